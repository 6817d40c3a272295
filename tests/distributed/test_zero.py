"""ZeRO and HSDP equal the single process: loss, every gradient, the norm and the weights after 3 steps, in float64."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from boost.config import ModelSection, OptimizerSection, ParallelSection, TrainConfig
from boost.model.decoder import Decoder
from boost.parallel import mesh as meshes
from boost.parallel.collectives import Collective, count_collectives
from boost.parallel.mesh import Mesh
from boost.training.batches import Batch, MicroBatch
from boost.training.loop import build_model, update
from boost.training.optimizers.adamw import build_adamw
from tests.distributed.harness import run_ranks
from tests.distributed.test_layout_parity import pairwise
from tests.models import build, distance, load, model_section, perturbed, tensors, worst

TOLERANCE = 1e-9
BATCH, STEPS = 16, 3
LAYOUTS = {"dp4": (4, 1, 1), "dp2 tp2": (2, 2, 1), "hsdp": (4, 1, 2)}  # dp, tp, dp_replicate
AXES: dict[str, list[Any]] = {
    "ranks": list(LAYOUTS),
    "zero": [0, 1, 2, 3],
    "layout": ["btp", "vanilla", "vanilla_sharded_heads", "dense"],
    "recompute": ["none", "latent", "block"],
    "overlap": ["none", "weight_grads", "split_batch"],
    "micro_batches": [1, 2],
    "tied_and_gqa": [True, False],
}


def product() -> list[dict[str, Any]]:
    """Every composition that the configuration allows."""
    cases = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    return [
        case
        for case in cases
        if not (case["ranks"] == "hsdp" and case["zero"] == 0)
        and not (case["layout"] == "dense" and case["recompute"] == "latent")
        and not (
            case["overlap"] == "split_batch"
            and (case["layout"] != "btp" or case["recompute"] == "block" or case["zero"] == 3)
        )
        # Overlap hides what tp communicates.
        and not (case["overlap"] != "none" and case["ranks"] != "dp2 tp2")
    ]


def section(case: dict[str, Any]) -> ModelSection:
    """Sizes that divide neither over tp nor over dp; with one kv head of width 6, a dp rank of four holds nothing."""
    dense = case["layout"] == "dense"
    kv_heads = {"dp2 tp2": 2}.get(case["ranks"], 1) if case["tied_and_gqa"] else 4
    return model_section(
        linear="dense" if dense else "low_rank",
        hidden_size=34,
        ffn_size=43,
        vocab_size=51,
        kv_heads=kv_heads,
        tie_embeddings=case["tied_and_gqa"],
        attention_bias=True,
        mlp_bias=not case["tied_and_gqa"],
    )


def batches(model: ModelSection) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """ids and labels of each step's global batch; the first sequences have hardly a label, the last ones all."""
    generator = torch.Generator().manual_seed(5)
    out = []
    for _ in range(STEPS):
        ids = torch.randint(model.vocab_size, (BATCH, 8), generator=generator)
        labels = ids[:, 1:].clone()
        for row in range(BATCH):
            labels[row, row // 2 :] = -100
        out.append((ids[:, :-1], labels))
    return out


def run_steps(model: Decoder, mesh: Mesh, micro_batches: int, zero: int) -> dict[str, Any]:
    """Three steps of AdamW with clipping over this dp rank's share of the batches."""
    optimizer = build_adamw(model, OptimizerSection(lr=1e-2, weight_decay=0.1))
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(tensors(model, gradients=True, shards=mesh.shards))
    )
    losses, norms = [], []
    per_rank = BATCH // mesh.dp.size
    for step, (ids, labels) in enumerate(batches(model.model)):
        mine = range(mesh.dp.rank * per_rank, (mesh.dp.rank + 1) * per_rank)
        micro = [
            MicroBatch(ids[i], labels[i], mine)
            for i in torch.tensor(mine).chunk(micro_batches)
        ]
        batch = Batch(micro, int((labels != -100).sum()), "")
        loss, norm = update(model, optimizer, batch, 1e-2, 0.5, mesh, step, zero=zero)
        losses.append(loss), norms.append(norm)
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "norms": torch.tensor(norms, dtype=torch.float64),
        "gradients": gradients,
        "weights": tensors(model, shards=mesh.shards),
    }


def config(case: dict[str, Any]) -> TrainConfig:
    dp, tp, replicate = LAYOUTS[case["ranks"]]
    layout = {} if case["layout"] == "dense" else {"tensor_layout": case["layout"]}
    parallel = {"dp": dp, "tp": tp, "dp_replicate": replicate, "zero": case["zero"], "overlap": case["overlap"], **layout}
    train = {
        "precision": "fp64",
        "recompute": case["recompute"],
        "global_batch_size": BATCH,
        "micro_batch_size": BATCH // dp // case["micro_batches"],
    }
    model = section(case).model_dump()
    return TrainConfig.from_dict({"model": model, "train": train, "parallel": parallel})


def compare(mesh: Mesh, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case the errors against one process."""
    out = []
    for case in cases:
        single = build(section(case), ParallelSection(group_linears=False))
        weights = perturbed(tensors(single))
        load(single, weights)
        expected = run_steps(single, Mesh(), 1, 0)

        settings = config(case)
        parallel = settings.parallel
        grid = meshes.build(1, parallel.dp, parallel.tp, torch.device("cpu"), 60, parallel.shards)
        model = build_model(settings, grid)
        assert type(next(model.parameters())).__name__ == ("DTensor" if case["zero"] else "Parameter")
        load(model, weights)
        found = run_steps(model, grid, case["micro_batches"], case["zero"])
        errors = {name: distance(found[name], expected[name]) for name in ("losses", "norms")}
        errors["weights"], _ = worst(found["weights"], expected["weights"])
        for step in range(STEPS):
            error, name = worst(found["gradients"][step], expected["gradients"][step])
            errors[f"gradient {name} of step {step}"] = error
        out.append({"case": case, "errors": errors})
    return out


@pytest.mark.parametrize("ranks", list(LAYOUTS))
def test_zero_equals_single_process(ranks: str) -> None:
    chosen = product() if os.environ.get("BOOST_FULL_PARITY") else pairwise(product())
    cases = [case for case in chosen if case["ranks"] == ranks]
    assert len(cases) >= 4
    for result in run_ranks(4, compare, cases):
        for outcome in result:
            assert all(error <= TOLERANCE for error in outcome["errors"].values()), outcome
