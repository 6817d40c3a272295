"""`train.compile`: the same numbers, no graph break, nothing compiled again after the first step."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from boost.config import ParallelSection
from boost.model.decoder import Decoder
from boost.parallel.mesh import Group, Mesh
from tests.distributed.harness import run_ranks
from tests.distributed.test_pipeline import PLAIN, Case, Outcome, check, train
from tests.models import build, load, model_section, perturbed, tensors

# Several layers share what is compiled; GQA, biases, an MLP that tp does not divide.
BATCHES = 8
SHAPE: dict[str, Any] = {"layers": 3, "kv_heads": 2, "attention_bias": True, "mlp_bias": True, "ffn_size": 45}


def gradients(model: Decoder, ids: Tensor) -> dict[str, Tensor]:
    """Of the mean loss, which is among them."""
    model.zero_grad(set_to_none=True)
    loss = model.loss(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()
    loss.backward()
    return {**tensors(model, gradients=True), "loss": loss.detach()}


def square(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The squared relative distance of whole gradients; infinite, not NaN, where it has none."""
    error = sum(float((a[n].double() - b[n].double()).square().sum()) for n in b)
    relative = error / sum(float(b[n].double().square().sum()) for n in b)
    return math.inf if math.isnan(relative) else relative


def compare(tp: Group, layout: str, recompute: Any, overlap: Any) -> dict[str, Any]:
    """Errors of compiled and eager models over several batches and weights, and what dynamo counted.

    One batch is not enough in bf16, where the error of a small model's gradient is a matter of luck.
    """
    linear = "dense" if layout == "dense" else "low_rank"
    model = model_section(linear=linear, **SHAPE)
    parallel = ParallelSection(tensor_layout="btp" if layout == "dense" else layout, overlap=overlap)  # type: ignore[arg-type]

    def make(dtype: torch.dtype, *, compile: bool = False) -> Decoder:
        return Decoder(model, parallel, tp, dtype=dtype, recompute=recompute, compile=compile)

    exact = make(torch.float64)
    out: dict[str, Any] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        torch._dynamo.reset()
        counters.clear()
        eager, fast = make(dtype), make(dtype, compile=True)
        seen: dict[str, Any] = {"to_eager": 0.0, "eager_square": 0.0, "square": 0.0}
        for seed in range(BATCHES):
            weights = perturbed(tensors(build(model, seed=seed)))
            ids = torch.randint(50, (4, 13), generator=torch.Generator().manual_seed(seed))
            for decoder in (exact, eager, fast):
                load(decoder, weights)
            reference, expected = gradients(exact, ids), gradients(eager, ids)
            with torch._dynamo.config.patch(error_on_recompile=seed > 0):
                found = gradients(fast, ids)
            seen["graphs_after"] = counters["stats"]["unique_graphs"]
            seen.setdefault("graphs", seen["graphs_after"])
            seen["to_eager"] = max(seen["to_eager"], math.sqrt(square(found, expected)))
            seen["eager_square"] += square(expected, reference)
            seen["square"] += square(found, reference)
        with torch.no_grad():  # another shape, not compiled
            fast.loss(ids[:1, :5], ids[:1, 1:6])
        seen["breaks"] = dict(counters["graph_break"])
        out[name] = seen
    return out


def on_ranks(mesh: Mesh, *case: Any) -> dict[str, Any]:
    return compare(mesh.tp, *case)


FULL = bool(os.environ.get("BOOST_FULL_PARITY"))
CASES = [("btp", "latent", "split_batch"), ("dense", "none", "none")]
if FULL:
    CASES += [("btp", "none", "none"), ("vanilla", "latent", "none"), ("dense", "block", "none")]


@pytest.mark.parametrize(("layout", "recompute", "overlap"), CASES)
def test_compiled_pieces_give_the_numbers_of_eager_ones(layout: str, recompute: str, overlap: str) -> None:
    for result in run_ranks(2, on_ranks, layout, recompute, overlap):
        assert result["fp32"]["to_eager"] <= 1e-5
        assert math.sqrt(result["bf16"]["square"]) <= 1.1 * math.sqrt(result["bf16"]["eager_square"])
        for seen in result.values():
            assert seen["breaks"] == {}
            assert seen["graphs_after"] == seen["graphs"] > 0


def trained(mesh: Mesh, case: Case) -> Outcome:
    """Three steps, all blocks compiled and whole."""
    outcome = train(mesh, case)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    return outcome


# tp, pp, dp.
SPREAD: list[Case] = [{**PLAIN, "layout": (1, 2, 2), "zero": 3, "recompute": "latent", "tie_embeddings": True}]
if FULL:
    SPREAD += [
        {**PLAIN, "layout": (2, 1, 2), "zero": 3, "recompute": "latent", "tie_embeddings": True},
        {**PLAIN, "layout": (2, 2, 1), "overlap": "split_batch", "schedule": "interleaved_1f1b", "layers": 4},
        {**PLAIN, "layout": (1, 2, 2), "linear": "dense", "zero": 2, "recompute": "block", "schedule": "gpipe"},
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SPREAD, ids=lambda case: f"{case['layout']} {case['linear']} zero {case['zero']}")
def test_compiled_stages_and_shards_equal_the_single_process(case: Case) -> None:
    """In fp64, with pp and ZeRO: losses, norms, gradients and weights of three steps."""
    case, (tp, pp, dp) = {**case, "compile": True}, case["layout"]
    check(case, run_ranks(tp * pp * dp, trained, case, layout=(pp, dp, tp)), train(Mesh(), case))
