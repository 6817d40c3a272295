"""`parallel.sequence_sharded_bottleneck`: the same numbers and volume as all-reduces, and smaller latents."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch

from boost.bench.memory import track_storages
from boost.config import ParallelSection
from boost.model.decoder import Decoder
from boost.parallel.collectives import count_collectives
from boost.parallel.mesh import Mesh
from boost.parallel.overlap import WeightGradQueue
from tests.distributed.harness import run_ranks
from tests.models import build, distance, load, loss_and_gradients, model_section, perturbed, tensors, tokens, worst

R, D, F = 10, 32, 48
CASES: list[dict[str, Any]] = [
    {},
    {"bottleneck_activation": "none", "tie_embeddings": True, "attention_bias": True},
    {"heads": 8, "kv_heads": 4, "mlp_bias": True, "ffn_size": 43},
    {"heads": 8, "kv_heads": 4, "bottleneck_activation": "none", "tie_embeddings": True, "dropout": 0.1},
]


def sharded(mesh: Mesh, model: Any, dtype: torch.dtype, grouped: bool, recompute: Any, queue: bool) -> Decoder:
    parallel = ParallelSection(tp=mesh.tp.size, group_linears=grouped, sequence_sharded_bottleneck=True)
    return Decoder(
        model, parallel, mesh.tp, dtype=dtype, recompute=recompute, queue=WeightGradQueue() if queue else None, seed=1
    )


def step(decoder: Decoder, batch: int, sequence: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], list, list]:
    ids, labels = tokens(decoder.model, batch, sequence)
    decoder.zero_grad()
    with count_collectives() as forward:
        loss = decoder.loss(ids, labels, samples=range(batch))
    with count_collectives() as backward:
        loss.backward()
        if decoder.queue is not None:
            decoder.queue.flush()
    return loss.detach(), tensors(decoder, gradients=True), forward, backward


def compare(
    mesh: Mesh, sizes: list[tuple[int, int]], grouped: bool, recompute: str, queue: bool
) -> list[tuple[Any, float, float, str]]:
    out = []
    for case in CASES:
        model = model_section(**case)
        weights = perturbed(tensors(build(model)))
        reference = build(model)
        load(reference, weights)
        mine = sharded(mesh, model, torch.float64, grouped, recompute, queue)
        load(mine, weights)
        for batch, sequence in sizes:
            loss, gradients, _, _ = step(reference, batch, sequence)
            my_loss, my_gradients, _, _ = step(mine, batch, sequence)
            out.append((case, distance(my_loss, loss), *worst(my_gradients, gradients)))
    return out


@pytest.mark.parametrize(
    ("grouped", "recompute", "queue"),
    [(True, "none", False), (False, "none", True), (True, "latent", True), (False, "latent", False)],
)
@pytest.mark.parametrize("tp", [2, 4])
def test_equals_the_single_process(tp: int, grouped: bool, recompute: str, queue: bool) -> None:
    """33 tokens, which tp does not divide, and 1, fewer than ranks."""
    for result in run_ranks(tp, compare, [(3, 11), (1, 1)], grouped, recompute, queue):
        for case, loss_error, gradient_error, name in result:
            assert loss_error < 1e-10, (case, loss_error)
            assert gradient_error < 1e-10, (case, gradient_error, name)


def small(layers: int) -> Any:
    return model_section(layers=layers, rank=R, hidden_size=D, ffn_size=F, head_size=8)


def per_block(mesh: Mesh, dtype: torch.dtype, grouped: bool, recompute: str) -> tuple[Counter, Counter]:
    """Collectives (name, elements) of one block, forward and backward."""
    seen = []
    for layers in (2, 3):
        decoder = sharded(mesh, small(layers), dtype, grouped, recompute, False)
        load(decoder, tensors(build(small(layers), dtype=torch.float32)))
        _, _, *ways = step(decoder, 3, 11)
        seen.append([Counter((c.name, c.elements) for c in way) for way in ways])
    assert not seen[0][0] - seen[1][0]
    assert not seen[0][1] - seen[1][1]
    return seen[1][0] - seen[0][0], seen[1][1] - seen[0][1]


TRAFFIC = list(itertools.product([torch.float32, torch.bfloat16], [True, False], ["none", "latent"]))


def traffic(mesh: Mesh) -> list[tuple[Counter, Counter]]:
    return [per_block(mesh, *case) for case in TRAFFIC]


@pytest.mark.parametrize("tp", [2, 4])
def test_traffic_of_a_block(tp: int) -> None:
    """Each bridge a reduce-scatter and an all-gather, of T rows padded to a multiple of tp, forward and backward.

    Forward the rows of the reduce-scatter also hold the statistic, in bf16 2 tp numbers; backward those of the
    all-gather hold its gradient, in bf16 the 2 numbers that make one of fp32. Latent recomputation adds an all-gather
    per bridge.
    """
    expected = [predicted(tp, *case) for case in TRAFFIC]
    for mine in run_ranks(tp, traffic):
        assert mine == expected


def predicted(tp: int, dtype: torch.dtype, grouped: bool, recompute: str) -> tuple[Counter, Counter]:
    rows = tp * math.ceil(33 / tp)
    bridges = [(3 * R, 1), (R, 0), (2 * R, 1), (R, 0)] if grouped else [(R, n) for n in (1, 1, 1, 0, 1, 1, 0)]
    slots, parts = (2 * tp, 2) if dtype == torch.bfloat16 else (1, 1)
    forward, backward = Counter(), Counter()
    for width, norms in bridges:
        forward["reduce_scatter", rows * (width + slots * norms)] += 1
        forward["all_gather", rows * width] += 1
        backward["reduce_scatter", rows * width] += 1
        backward["all_gather", rows * (width + parts * norms)] += 1
        if recompute == "latent":
            backward["all_gather", rows * width] += 1
    return forward, backward


def kept(mesh: Mesh, layers: int, dtype: torch.dtype, recompute: str) -> int:
    decoder = sharded(mesh, small(layers), dtype, True, recompute, False).eval()
    load(decoder, tensors(build(small(layers), dtype=torch.float32)))
    ids, labels = tokens(decoder.model, batch=4, sequence=32)
    with track_storages() as tracker:
        loss = decoder.loss(ids, labels)
    assert loss.requires_grad
    return tracker.live_bytes(excluding=decoder.parameters())


def kept_per_token(mesh: Mesh, dtype: torch.dtype, recompute: str) -> float:
    return (kept(mesh, 5, dtype, recompute) - kept(mesh, 3, dtype, recompute)) / 2 / 128


@pytest.mark.parametrize(("tp", "dtype"), [(2, torch.float32), (4, torch.bfloat16)], ids=str)
def test_latent_recomputation_keeps_a_share_of_the_latents(tp: int, dtype: torch.dtype) -> None:
    """7 r / tp instead of 7 r elements per token and block; without recomputation 7 r (1 + 1 / tp): h is saved too."""
    size = dtype.itemsize
    scalars = 4 * (2 + 2 / tp)  # |x| of the shard, 1/rms of the rank's tokens, of two norms
    latents, residual = 7 * R / tp * size, 2 * D / tp * size
    for mine in run_ranks(tp, kept_per_token, dtype, "latent"):
        assert latents < mine <= latents + residual + scalars
    for mine in run_ranks(tp, kept_per_token, dtype, "none"):
        assert mine > 7 * R * (1 + 1 / tp) * size


def bf16_error(mesh: Mesh, is_sharded: bool) -> float:
    model = model_section()
    weights = perturbed(tensors(build(model)))
    exact = build(model)
    load(exact, weights)
    _, exact_gradients = loss_and_gradients(exact, *tokens(model))
    parallel = ParallelSection(tp=mesh.tp.size, sequence_sharded_bottleneck=is_sharded)
    decoder = Decoder(model, parallel, mesh.tp, dtype=torch.bfloat16)
    load(decoder, weights)
    _, gradients = loss_and_gradients(decoder, *tokens(model))
    flat = [torch.cat([g[n].double().flatten() for n in sorted(g)]) for g in (gradients, exact_gradients)]
    return distance(*flat)


@pytest.mark.parametrize("tp", [2, 4])
def test_bf16_is_as_exact_as_with_all_reduces(tp: int) -> None:
    whole, mine = (run_ranks(tp, bf16_error, is_sharded)[0] for is_sharded in (False, True))
    assert mine < 1.2 * whole < 2e-2
