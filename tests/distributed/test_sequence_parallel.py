"""Dense blocks with sequence parallelism: overlap, recomputation and token counts that tp does not divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from boost.bench.memory import track_storages
from boost.config import ParallelSection
from boost.model.decoder import Decoder
from boost.parallel.collectives import count_collectives
from boost.parallel.mesh import Mesh
from boost.parallel.overlap import WeightGradQueue
from boost.parallel.sharding import initialize
from tests.distributed.harness import run_ranks
from tests.models import build, distance, load, loss_and_gradients, model_section, perturbed, tensors, tokens, worst

D, F = 32, 48


def dense(mesh: Mesh, model: Any, dtype: torch.dtype, recompute: Any, queue: bool, **parallel: Any) -> Decoder:
    return Decoder(
        model,
        ParallelSection(tp=mesh.tp.size, **{"sequence_parallel": True, **parallel}),
        mesh.tp,
        dtype=dtype,
        recompute=recompute,
        queue=WeightGradQueue() if queue else None,
        seed=1,
    )


def compare(mesh: Mesh, recompute: str, queue: bool, grouped: bool) -> list[tuple[Any, float, float, str]]:
    out = []
    for changes in ({}, {"tie_embeddings": True, "attention_bias": True, "mlp_bias": True, "ffn_size": 43}):
        model = model_section(linear="dense", **changes)
        weights = perturbed(tensors(build(model)))
        single = build(model)
        load(single, weights)
        mine = dense(mesh, model, torch.float64, recompute, queue, group_linears=grouped)
        load(mine, weights)
        for batch, sequence in ((3, 11), (1, 1)):
            ids, labels = tokens(model, batch, sequence)
            if batch == 1:
                labels = torch.zeros_like(labels)
            loss, gradients = loss_and_gradients(single, ids, labels)
            mine.zero_grad()
            my_loss = mine.loss(ids, labels) / (labels != -100).sum()
            my_loss.backward()
            if mine.queue is not None:
                mine.queue.flush()
            error = worst(tensors(mine, gradients=True), gradients)
            out.append(((changes, batch), distance(my_loss.detach(), loss), *error))
    return out


@pytest.mark.parametrize(
    ("tp", "recompute", "queue", "grouped"),
    [(2, "none", True, True), (4, "none", True, False), (4, "block", False, True), (2, "block", True, False)],
)
def test_equals_the_single_process(tp: int, recompute: str, queue: bool, grouped: bool) -> None:
    """33 tokens, which tp does not divide, and 1, fewer than ranks."""
    for result in run_ranks(tp, compare, recompute, queue, grouped):
        for case, loss_error, gradient_error, name in result:
            assert loss_error < 1e-10, (case, loss_error)
            assert gradient_error < 1e-10, (case, gradient_error, name)


def costs(mesh: Mesh, recompute: str, queue: bool, sequence_parallel: bool = True) -> tuple[float, int]:
    """Kept bytes per token and block, and collectives per block in backward."""
    kept, calls = [], []
    for layers in (3, 5):
        model = model_section(linear="dense", layers=layers, hidden_size=D, ffn_size=F, head_size=8)
        decoder = dense(mesh, model, torch.float32, recompute, queue, sequence_parallel=sequence_parallel)
        initialize(decoder, 1, mesh.tp)
        ids, labels = tokens(model, batch=4, sequence=64)
        with track_storages() as tracker:
            loss = decoder.loss(ids, labels)
        kept.append(tracker.live_bytes(excluding=decoder.parameters()))
        with count_collectives() as seen:
            loss.backward()
            if decoder.queue is not None:
                decoder.queue.flush()
        calls.append(len(seen))
    return (kept[1] - kept[0]) / 2 / ids.numel(), (calls[1] - calls[0]) // 2


@pytest.mark.parametrize("queue", [False, True], ids=["now", "queued"])
def test_what_is_kept_is_sharded(queue: bool) -> None:
    """Of what Megatron keeps whole, inputs, results and 1 / rms of two norms, each rank has half the tokens."""
    for (whole, whole_calls), (share, calls) in zip(
        run_ranks(2, costs, "none", queue, False), run_ranks(2, costs, "none", queue), strict=True
    ):
        assert whole - share == 4 * (4 * D + 2) / 2
        assert (whole_calls, calls) == (2, 8)


def test_recomputed_blocks_keep_their_input_alone() -> None:
    """Backward repeats the all-gathers, and the reduce-scatter after o but not the last one, and none twice."""
    for kept, calls in run_ranks(2, costs, "block", False):
        assert kept == 4 * D / 2
        assert calls == 2 + 2 + 2 + 3
