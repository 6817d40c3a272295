"""What a pipeline's step costs: what crosses and what is reduced, the products that move, the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.utils.flop_counter import FlopCounterMode

from boost.bench.memory import track_storages
from boost.model.stages import PipelinedDecoder
from boost.parallel.bubble import Action, actions
from boost.parallel.collectives import count_collectives
from boost.parallel.mesh import Group, Mesh
from boost.training.batches import Batch, MicroBatch
from boost.training.loop import build_model, forward_backward
from tests.distributed.harness import run_ranks
from tests.distributed.test_pipeline import LENGTH, PLAIN, SCHEDULES, SEQUENCES, Case, batches, config
from tests.models import SMALL, distance, tensors

Traffic = Counter[tuple[str, int, int]]


def second_step(mesh: Mesh, case: Case) -> Traffic:
    """What the second step sends and reduces, by name, elements and bytes."""
    settings = config(case, (mesh.tp.size, mesh.pp.size, mesh.dp.size))
    model = build_model(settings, mesh)
    first, second, _ = batches(settings, mesh)
    forward_backward(model, first, mesh)
    ran: list[Action] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            patch.setattr(PipelineStage, name, _recorded(getattr(PipelineStage, name), name, ran))
        with count_collectives() as seen:
            forward_backward(model, second, mesh)
            if isinstance(model, PipelinedDecoder):
                model.join_twins()
    if isinstance(model, PipelinedDecoder):
        assert ran == actions(model.pipeline)[mesh.pp.rank], "the table is what is run"
    return Counter((c.name.rstrip("_"), c.elements, c.bytes) for c in seen)


def _recorded(function: Any, name: str, ran: list[Action]) -> Any:
    def run(stage: PipelineStage, chunk: int, *args: Any, **kwargs: Any) -> Any:
        split = kwargs.get("full_backward") is False
        kind = {"forward_one_chunk": "F", "backward_one_chunk": "I" if split else "B"}.get(name, "W")
        ran.append(Action(kind, stage.stage_index, chunk))
        return function(stage, chunk, *args, **kwargs)

    return run


def second_steps(mesh: Mesh, case: Case, schedules: Sequence[str]) -> dict[str, Traffic]:
    """By schedule."""
    return {schedule: second_step(mesh, {**case, "schedule": schedule}) for schedule in schedules}


TIED: Case = {**PLAIN, "layers": 5, "tie_embeddings": True}


@pytest.fixture(scope="module")
def traffic() -> list[dict[str, Traffic]]:
    """Of every rank of two stages and two tp ranks, under BTP in fp64."""
    return run_ranks(4, second_steps, TIED, SCHEDULES, layout=(2, 1, 2))


def check_crossing(traffic: list[dict[str, Traffic]], width: int, item: int, master: int) -> None:
    """Of two stages and two tp ranks: what each sends and receives of a step.

    Args:
        width: of what crosses.
        item, master: bytes of an activation, and of a weight's gradient.
    """
    shard, micro_batches = 2 * LENGTH * width, SEQUENCES // 2
    table = 26 * SMALL["hidden_size"]  # half of 51 rows, padded
    for rank in traffic:
        for schedule, seen in rank.items():
            # Forward the rank before a boundary sends, backward the one after it. Of zbv's three boundaries the middle
            # one lies within a rank, and its first and last stage are on one rank and share their table.
            crossings = {"interleaved_1f1b": 3, "zbv": 2}.get(schedule, 1) * micro_batches
            expected = {(shard, item * shard): crossings}
            if schedule != "zbv":
                expected[table, master * table] = 1
            for kind in ("send", "recv"):
                assert {(n, size): times for (name, n, size), times in seen.items() if name == kind} == expected, (
                    schedule
                )


def test_what_crosses_a_stage(traffic: list[dict[str, Traffic]]) -> None:
    """A micro-batch's shard of the residual stream, n d / tp elements, once forward and once backward per boundary."""
    check_crossing(traffic, SMALL["hidden_size"] // 2, 8, 8)


@pytest.mark.parametrize("linear", ["btp", "vanilla", "dense"])
def test_what_crosses_a_stage_in_bf16(linear: str) -> None:
    """Two bytes an element; n d elements in the layouts whose residual stream is whole."""
    width = SMALL["hidden_size"] // (2 if linear == "btp" else 1)
    case, schedules = {**TIED, "linear": linear, "precision": "bf16"}, ["1f1b", "zbv"]
    check_crossing(run_ranks(4, second_steps, case, schedules, layout=(2, 1, 2)), width, 2, 4)


def test_schedules_repeat_no_collective(traffic: list[dict[str, Traffic]]) -> None:
    """Whatever the order, and where backward is split in two, tp ranks reduce what they would reduce without pp."""
    alone = run_ranks(2, second_step, TIED)[0]
    assert sum(alone.values()) > 100
    for schedule in SCHEDULES:
        together = sum((rank[schedule] for rank in traffic[::2]), Counter())
        assert {kind: n for kind, n in together.items() if kind[0] not in ("send", "recv")} == alone, schedule


def reduced(mesh: Mesh, zero: int, linear: str, tied: bool) -> list[tuple[Traffic, Tensor]]:
    """In bf16 under 1f1b and a zero-bubble schedule: what a second step sends over dp, and its gradients.

    First the gradients in fp64.
    """
    out: list[tuple[Traffic, Tensor]] = []
    grid = replace(mesh, shards=mesh.dp, replicas=Group())
    for schedule, precision in (("1f1b", "fp64"), ("1f1b", "bf16"), ("zero_bubble", "bf16")):
        case = {**PLAIN, "schedule": schedule, "zero": zero, "linear": linear, "tie_embeddings": tied}
        settings = config(case, (1, 2, 2))
        train = settings.train.model_copy(update={"precision": precision})
        model = build_model(settings.model_copy(update={"train": train}), grid)
        for batch in batches(settings, grid)[:2]:
            model.zero_grad()
            with count_collectives() as seen:
                forward_backward(model, batch, grid, zero)
        found = tensors(model, gradients=True, tp=grid.tp, shards=grid.shards)
        sent = Counter((c.name, c.elements, c.bytes) for c in seen if c.name not in ("send", "recv"))
        units = len(cast(PipelinedDecoder, model).decoders[0].blocks) + 1
        reductions = sum(times for (name, *_), times in sent.items() if name == "reduce_scatter")
        assert reductions == units or (zero == 2 and units < reductions <= units * settings.micro_batches)
        out.append((sent, torch.cat([found[name].double().flatten() for name in sorted(found)])))
    return out


def reduced_elements(sent: Traffic) -> int:
    """Of all reduce-scatters, which are in fp32."""
    scatters = [(elements, size, times) for (name, elements, size), times in sent.items() if name == "reduce_scatter"]
    assert all(size == 4 * elements for elements, size, _ in scatters)
    return sum(elements * times for elements, _, times in scatters)


def others(sent: Traffic) -> Traffic:
    return Counter({kind: times for kind, times in sent.items() if kind[0] != "reduce_scatter"})


@pytest.mark.parametrize(
    ("zero", "linear", "tied"),
    [(1, "btp", False), (2, "btp", False), (2, "btp", True), (2, "dense", False), (2, "vanilla", True)],
)
def test_zero_bubble_reduces_as_often_and_as_well(zero: int, linear: str, tied: bool) -> None:
    """Under ZeRO: each unit's gradients once per step or at most once per micro-batch, in fp32.

    Also where a unit has gradients from both passes: of projections, and of gains and biases.
    """
    ranks = run_ranks(4, reduced, zero, linear, tied, layout=(2, 2, 1))
    for (_, exact), (sent, plain), (sent_apart, apart) in ranks:
        if zero == 1:
            assert sent == sent_apart
        else:
            # What waits for the blocks' passes, two micro-batches' gradients of it may be reduced as one.
            assert 0 < reduced_elements(sent_apart) <= reduced_elements(sent)
            assert others(sent_apart) == others(sent)
        assert 1e-4 < distance(plain, exact) < 0.1, "bf16 it is"
        assert distance(apart, exact) < 1.05 * distance(plain, exact)


def flops(mesh: Mesh, schedule: str) -> tuple[int, int]:
    """Of a step on this rank, and of those the weight gradients that run apart."""
    case = {**PLAIN, "schedule": schedule, "layers": 5}
    settings = config(case, (1, 2, 1))
    model = build_model(settings, mesh)
    counter = FlopCounterMode(display=False)
    apart = 0

    def counted(stage: PipelineStage, chunk: int, *args: Any, **kwargs: Any) -> None:
        nonlocal apart
        before = counter.get_total_flops()
        run(stage, chunk, *args, **kwargs)
        apart += counter.get_total_flops() - before

    with pytest.MonkeyPatch.context() as patch, counter:
        run = PipelineStage.backward_weight_one_chunk
        patch.setattr(PipelineStage, "backward_weight_one_chunk", counted)
        forward_backward(model, batches(settings, mesh)[0], mesh)
    return counter.get_total_flops(), apart


def test_zero_bubble_moves_products_and_repeats_none() -> None:
    plain, moved = run_ranks(2, flops, "1f1b", layout=(2, 1, 1)), run_ranks(2, flops, "zero_bubble", layout=(2, 1, 1))
    for (total, apart), (moved_total, moved_apart) in zip(plain, moved, strict=True):
        assert apart == 0
        assert moved_total == total
        # A third of the linears' work is their weights' gradients; not split: attention, and the head's.
        assert 0.15 * total < moved_apart < 0.34 * total


def peak_bytes(mesh: Mesh, schedule: str, sequences: int) -> int:
    """The most that is alive of what a second step allocates, beside the gradients."""
    settings = config({**PLAIN, "schedule": schedule}, (1, 2, 1))
    settings = settings.model_copy(
        update={"train": settings.train.model_copy(update={"global_batch_size": sequences, "sequence_length": 64})}
    )
    model = build_model(settings, mesh)
    ids = torch.zeros(sequences, 64, dtype=torch.int64)
    micro_batches = [MicroBatch(ids[i : i + 2], ids[i : i + 2], range(i, i + 2)) for i in range(0, sequences, 2)]
    batch = Batch(micro_batches, ids.numel(), "")
    forward_backward(model, batch, mesh)
    with track_storages(sample=True) as tracker:
        forward_backward(model, batch, mesh)
    return tracker.peak


def test_peak_memory_does_not_grow_with_micro_batches() -> None:
    """Under 1f1b a rank holds no more of 16 micro-batches than of 4; under gpipe it holds all."""
    few, many = (run_ranks(2, peak_bytes, "1f1b", n, layout=(2, 1, 1)) for n in (8, 24))
    for less, more in zip(few, many, strict=True):
        assert more < 1.1 * less
    few, many = (run_ranks(2, peak_bytes, "gpipe", n, layout=(2, 1, 1)) for n in (8, 24))
    for less, more in zip(few, many, strict=True):
        assert more > 2.5 * less
