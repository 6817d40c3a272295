"""SLTrain: the decoder against plain torch with dense matrices, in every layout, and what it sends."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config import ModelSection, ParallelSection, TrainConfig
from boost.model.blocks.shapes import attention_linears, mlp_linears
from boost.model.decoder import Decoder
from boost.model.sparse import drawn
from boost.parallel import mesh as meshes
from boost.parallel.collectives import count_collectives, spread_online
from boost.parallel.data_parallel import sum_gradients
from boost.parallel.mesh import Mesh
from boost.parallel.overlap import WeightGradQueue
from boost.parallel.sharding import described
from boost.training.batches import Batch, MicroBatch
from boost.training.loop import build_model, forward_backward
from tests.distributed.harness import run_ranks
from tests.distributed.test_layout_parity import pairwise
from tests.models import build, distance, load, loss_and_gradients, model_section, perturbed, tensors, tokens, worst
from tests.oracle import plain_loss

TOLERANCE = 1e-10
SEED = 1
BATCH, SEQUENCE = 4, 11
AXES: dict[str, list[Any]] = {
    "support": ["uniform", "block_diagonal"],
    "grouped": [True, False],
    "norm": ["online", "sync"],
    "tied_and_gqa": [True, False],
    "recompute": ["none", "block"],
    "overlap": ["none", "weight_grads"],
}
PRODUCT = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
CASES = PRODUCT if os.environ.get("BOOST_FULL_PARITY") else pairwise(PRODUCT)


def section(support: str, tied_and_gqa: bool = False, **changes: Any) -> ModelSection:
    """Supports of many and of few entries; four blocks; an MLP that only four blocks let divide; biases alternate."""
    uniform = support == "uniform"
    fields: dict[str, Any] = {
        "linear": "sltrain",
        "sparse_support": support,
        "sparse_density": 0.07 if uniform else 0.2,
        "sparse_blocks": 4,
        "lora_alpha": 9.0,
        "heads": 8,
        "kv_heads": 4 if tied_and_gqa else 8,
        "ffn_size": 43 if uniform else 44,
        "vocab_size": 51,
        "tie_embeddings": tied_and_gqa,
        "attention_bias": tied_and_gqa,
        "mlp_bias": not tied_and_gqa,
    }
    return model_section(**{**fields, **changes})


def weights_of(model: ModelSection) -> dict[str, Tensor]:
    """B, which starts at zero, is given values, or A and everything before would have no gradient."""
    generator = torch.Generator().manual_seed(11)
    return {
        name: 0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype) if "up.weight" in name else value
        for name, value in perturbed(tensors(build(model, seed=SEED))).items()
    }


def oracle(model: ModelSection, weights: dict[str, Tensor], ids: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    """The same decoder in plain torch, every linear one dense matrix: mean loss and gradients."""
    p = {name: value.clone().requires_grad_() for name, value in weights.items()}
    supports = drawn(model, SEED)
    linears = {
        linear.name: linear
        for layer in range(model.layers)
        for linear in (*attention_linears(model, layer), *mlp_linears(model, layer))
    }

    def apply(x: Tensor, layer: int, name: str) -> Tensor:
        prefix = f"blocks.{layer}.{name}"
        linear = linears[prefix]
        sparse = torch.zeros(linear.d_out * linear.d_in, dtype=torch.float64)
        sparse = sparse.index_put((supports(linear),), p[f"{prefix}.sparse.values"]).view(linear.d_out, linear.d_in)
        product = p[f"{prefix}.up.weight"] @ p[f"{prefix}.down.weight"]
        return F.linear(x, model.lora_alpha / model.rank * product + sparse, p.get(f"{prefix}.bias"))

    loss = plain_loss(model, p, ids, labels, apply)
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in p.items()}


@cache
def prepared(support: str, tied_and_gqa: bool) -> tuple[ModelSection, dict[str, Tensor], Any]:
    model = section(support, tied_and_gqa)
    weights = weights_of(model)
    ids, labels = tokens(model, BATCH, SEQUENCE)
    return model, weights, (ids, labels, *oracle(model, weights, ids, labels))


def compare(mesh: Mesh) -> list[tuple[Any, float]]:
    """Every case's worst error of loss and gradients."""
    out = []
    for case in CASES:
        model, weights, (ids, labels, loss, gradients) = prepared(case["support"], case["tied_and_gqa"])
        queue = WeightGradQueue() if case["overlap"] == "weight_grads" else None
        decoder = Decoder(
            model,
            ParallelSection(tp=mesh.tp.size, group_linears=case["grouped"], norm=case["norm"]),
            mesh.tp,
            dtype=torch.float64,
            seed=SEED,
            recompute=case["recompute"],
            queue=queue,
        )
        load(decoder, weights)
        found = decoder.loss(ids, labels) / (labels != -100).sum()
        found.backward()
        if queue is not None:
            queue.flush()
        error, name = worst(tensors(decoder, gradients=True), gradients)
        out.append(((case, name), max(error, distance(found.detach(), loss))))
    return out


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layouts_equal_plain_torch(tp: int) -> None:
    assert len(CASES) >= 4
    for result in [compare(Mesh())] if tp == 1 else run_ranks(tp, compare):
        for case, error in result:
            assert error <= TOLERANCE, (case, error)


# pp, dp, tp, ZeRO stage, overlap (which does nothing at tp = 1), and more fields of `parallel`.
SPREAD: list[tuple[str, tuple[int, int, int], int, str, dict[str, Any]]] = [
    ("uniform", (2, 1, 2), 0, "weight_grads", {}),
    ("block_diagonal", (2, 1, 2), 0, "none", {"pipeline_schedule": "zero_bubble"}),
    ("block_diagonal", (2, 2, 1), 2, "none", {"norm": "sync"}),
    ("uniform", (2, 2, 1), 1, "none", {"pipeline_schedule": "zero_bubble"}),
    ("uniform", (1, 2, 2), 0, "none", {"group_linears": False}),
    ("uniform", (1, 2, 2), 1, "weight_grads", {"group_linears": False}),
    ("block_diagonal", (1, 2, 2), 2, "none", {}),
    ("uniform", (1, 2, 2), 3, "none", {}),
    ("block_diagonal", (1, 2, 2), 3, "weight_grads", {}),
    ("block_diagonal", (1, 4, 1), 3, "none", {"dp_replicate": 2}),
]


def spread(mesh: Mesh) -> list[tuple[Any, float]]:
    out = []
    for number, (support, (pp, dp, tp), zero, overlap, options) in enumerate(SPREAD):
        model, weights, (ids, labels, _, gradients) = prepared(support, number % 2 == 1)
        config = TrainConfig.from_dict(
            {
                "model": model.model_dump(),
                "train": {
                    "seed": SEED,
                    "precision": "fp64",
                    "sequence_length": SEQUENCE,
                    "global_batch_size": BATCH,
                    "micro_batch_size": 1,
                    "recompute": "block" if zero == 3 else "none",
                },
                "parallel": {"pp": pp, "dp": dp, "tp": tp, "zero": zero, "overlap": overlap, **options},
            }
        )
        grid = meshes.build(pp, dp, tp, torch.device("cpu"), 60, config.parallel.shards)
        decoder = build_model(config, grid)
        load(decoder, weights, grid.tp)
        mine = range(grid.dp.rank * BATCH // dp, (grid.dp.rank + 1) * BATCH // dp)
        micro = [MicroBatch(ids[i : i + 1], labels[i : i + 1], range(i, i + 1)) for i in mine]
        forward_backward(decoder, Batch(micro, int((labels != -100).sum()), ""), grid, zero)
        if grid.shards.size == 1:
            sum_gradients(decoder.parameters(), grid.dp)
        if pp > 1:
            decoder.join_twins()  # type: ignore[operator]
        found = tensors(decoder, gradients=True, tp=grid.tp, shards=grid.shards)
        error, name = worst(found, {name: gradients[name] for name in found})
        out.append(((support, pp, dp, tp, zero, overlap, name), error))
    return out


def test_stages_and_shards_equal_plain_torch() -> None:
    for result in run_ranks(4, spread):
        assert len(result) == len(SPREAD)
        for case, error in result:
            assert error <= TOLERANCE, (case, error)


# --- What it sends ---

D, FFN, R, HEADS, HEAD = 40, 72, 10, 4, 14
Q, TP, TOKENS = HEADS * HEAD, 2, 18


def counted(mesh: Mesh) -> dict[Any, tuple[Counter, Counter]]:
    """One block's collectives forward and backward: the difference between three blocks and two."""
    found = {}
    variants = [(grouped, norm, torch.float32) for grouped in (True, False) for norm in ("online", "sync")]
    variants.append((True, "online", torch.bfloat16))
    for support, (grouped, norm, dtype) in itertools.product(("uniform", "block_diagonal"), variants):
        ways: list[tuple[Counter, Counter]] = []
        for layers in (2, 3):
            model = ModelSection(
                linear="sltrain",
                sparse_support=support,  # type: ignore[arg-type]
                hidden_size=D,
                ffn_size=FFN,
                layers=layers,
                heads=HEADS,
                head_size=HEAD,
                rank=R,
                vocab_size=54,
            )
            decoder = build(model, ParallelSection(tp=TP, group_linears=grouped, norm=norm), mesh.tp, dtype)  # type: ignore[arg-type]
            ids = torch.arange(TOKENS).reshape(2, -1)
            with count_collectives() as forward:
                loss = decoder.loss(ids, ids)
            with count_collectives() as backward:
                loss.backward()
            ways.append(tuple(Counter((c.name, c.elements) for c in seen) for seen in (forward, backward)))  # type: ignore[arg-type]
        found[support, grouped, norm, dtype.itemsize] = tuple(three - two for two, three in zip(*ways, strict=True))
    return found


def test_collectives_are_those_stated() -> None:
    """Bridges of 7 r both ways, with the norm's statistic in forward, and in backward the gradient of one 1/rms per
    norm; and uniform supports add four all-gathers forward and four reduce-scatters backward, of d, Q, d and d_ff."""
    first, second = run_ranks(TP, counted)
    assert first == second
    assert len(first) == 10
    wide = Counter({D * TOKENS: 2, Q * TOKENS: 1, FFN * TOKENS: 1})
    for (support, grouped, norm, width), ways in first.items():
        for way, gather in zip(ways, ("all_gather", "reduce_scatter"), strict=True):
            statistic = 0 if norm == "sync" else 2 * TP if width == 2 else 1
            behind_norms, others = ((3, 2), (1, 1)) if grouped else ((1,) * 5, (1, 1))
            # Ungrouped, q and gate carry the gradient of their norm's 1/rms for k, v and up as well.
            alone = 3 if gather == "reduce_scatter" and not grouped else 0
            expected = Counter(("all_reduce", (n * R + statistic) * TOKENS) for n in behind_norms[alone:])
            expected += Counter(("all_reduce", n * R * TOKENS) for n in (*behind_norms[:alone], *others))
            if norm == "sync":
                expected["all_reduce", TOKENS] += 2
            if support == "uniform":
                expected += Counter({(gather, size): times for size, times in wide.items()})
            assert way == expected, (support, grouped, norm, width)


def summed(mesh: Mesh) -> tuple[Tensor, Tensor]:
    """The gradients that `spread_online` gives a bf16 latent and its 1/rms; each rank adds its number."""
    h_TR = torch.ones(5, 3, dtype=torch.bfloat16, requires_grad=True)
    inverse_T = torch.ones(5, requires_grad=True)
    h, inverse = spread_online(h_TR, inverse_T, mesh.tp)
    factor = torch.tensor([1e-3, 3.7, -512.25, 7e4, 0.1]) / (3 + mesh.tp.rank)
    (h.float().sum() * 2**mesh.tp.rank + (inverse * factor).sum()).backward()
    assert h_TR.grad is not None
    assert inverse_T.grad is not None
    return h_TR.grad, inverse_T.grad


def test_the_gradient_of_the_statistic_is_exact_in_bf16() -> None:
    expected = torch.tensor([1e-3, 3.7, -512.25, 7e4, 0.1]) * (1 / 3 + 1 / 4)
    for latent, statistic in run_ranks(2, summed):
        assert torch.equal(latent, torch.full((5, 3), 3.0, dtype=torch.bfloat16))
        assert ((statistic - expected) / expected).abs().max() < 2**-16


# --- Supports ---


def shared_support(mesh: Mesh, support: str) -> bool:
    """Whether this rank's positions are its rows of what one process has."""
    model = section(support)
    whole = {part.name: part.support for _, parts in described(build(model)) for part in parts if part.support}
    decoder = build(model, ParallelSection(tp=mesh.tp.size), mesh.tp)
    own = {part.name: part.support for _, parts in described(decoder) for part in parts if part.support}
    assert own.keys() == whole.keys()
    assert len(own) == 7 * model.layers
    return all(
        torch.equal(mine.positions, whole[name].positions[mine.start :][: len(mine.positions)])
        and len(mine.positions) < len(whole[name].positions)
        for name, mine in own.items()
    )


@pytest.mark.parametrize("support", ["uniform", "block_diagonal"])
def test_supports_do_not_depend_on_tp(support: str) -> None:
    assert all(run_ranks(2, shared_support, support))


@pytest.mark.parametrize(("support", "density"), [("uniform", 0.03), ("uniform", 0.8), ("block_diagonal", 0.03)])
def test_supports_are_drawn_without_replacement(support: str, density: float) -> None:
    """As many as published, all different, spread evenly, others for each linear and seed; blocks only where asked."""
    model = section(support, hidden_size=256, sparse_density=density, heads=8, head_size=32)
    q, k, *_ = attention_linears(model, 0)
    positions = drawn(model, 0)(q)
    assert len(positions) == int(density * 256 * 256)
    assert (positions[1:] > positions[:-1]).all()
    assert positions[0] >= 0
    assert positions[-1] < 256 * 256
    for other in (drawn(model, 1)(q), drawn(model, 0)(k)):
        assert not torch.equal(other, positions)
    assert torch.equal(drawn(model, 0)(q), positions)
    row, column = positions // 256, positions % 256
    if support == "block_diagonal":
        assert torch.equal(row // 64, column // 64)
    for side in (row, column):
        count = torch.bincount(side, minlength=256).double()
        assert (count - density * 256).abs().max() < 6 * (density * 256) ** 0.5
    groups = torch.bincount(row // 64 * 4 + column // 64, minlength=16)
    expected = len(positions) / (4 if support == "block_diagonal" else 16)
    assert sum(abs(n - expected) < 6 * expected**0.5 for n in groups.tolist()) == (
        4 if support == "block_diagonal" else 16
    )


def test_values_and_factors_start_as_published() -> None:
    """Values and A uniform in +-1/sqrt(d_in), B zero; matrices are decayed, the sparse ones too."""
    model = section("uniform", hidden_size=256, ffn_size=400, sparse_density=0.2)
    decoder = build(model, dtype=torch.float32)
    found = tensors(decoder)
    for name, d_in in (("attention.q", 256), ("attention.o", 48), ("mlp.down", 400)):
        for part in ("sparse.values", "down.weight"):
            value = found[f"blocks.0.{name}.{part}"]
            bound = d_in**-0.5
            assert 0.98 * bound < float(value.abs().max()) <= bound
            assert float(value.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not found[f"blocks.0.{name}.up.weight"].any()
    decayed = {part.name: part.decayed for _, parts in described(decoder) for part in parts}
    assert decayed["blocks.0.mlp.up.sparse.values"]
    assert not decayed["blocks.0.mlp.up.bias"]


def in_bf16(mesh: Mesh) -> dict[Any, tuple[float, dict[str, float]]]:
    """How far the loss and each gradient in bf16 are from plain torch in fp64."""
    out = {}
    for support, norm, grouped in itertools.product(("uniform", "block_diagonal"), ("online", "sync"), (True, False)):
        model, weights, (ids, labels, loss, gradients) = prepared(support, False)
        parallel = ParallelSection(tp=mesh.tp.size, norm=norm, group_linears=grouped)  # type: ignore[arg-type]
        decoder = build(model, parallel, mesh.tp, torch.bfloat16, SEED)
        load(decoder, weights)
        found, found_gradients = loss_and_gradients(decoder, ids, labels)
        errors = {name: distance(found_gradients[name], gradients[name]) for name in gradients}
        out[support, norm, grouped] = distance(found, loss), errors
    return out


@pytest.mark.parametrize("tp", [1, 2])
def test_bf16_is_near_fp64(tp: int) -> None:
    """The same weights computed in bf16, in one process and over two.

    A gradient's path has some 16 roundings in each of four sublayers, and as many back: 128 of at most 2^-8, which add
    up as the root of their number where they are independent. The worst tensor may have twice that, for norms and
    attention amplify. The loss is a mean over 40 tokens.
    """
    bound = 128**0.5 * 2**-8
    for result in [in_bf16(Mesh())] if tp == 1 else run_ranks(tp, in_bf16):
        assert len(result) == 8
        for case, (loss, errors) in result.items():
            assert loss < 1e-2, case
            assert max(errors.values()) < 2 * bound, (case, max(errors, key=errors.__getitem__))
