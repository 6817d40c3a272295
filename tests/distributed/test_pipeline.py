"""Pipelines equal the single process: loss, gradient norm, every gradient, weights after 3 steps, in float64."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.utils.flop_counter import FlopCounterMode

from boost.bench.memory import track_storages
from boost.config import TrainConfig
from boost.config_rules import STAGES_PER_RANK, ZERO_BUBBLE
from boost.model.stages import PipelinedDecoder
from boost.parallel.bubble import Action, actions
from boost.parallel.collectives import count_collectives
from boost.parallel.mesh import Group, Mesh
from boost.training.batches import Batch, MicroBatch
from boost.training.loop import build_model, forward_backward, update
from boost.training.optimizers.adamw import build_adamw
from tests.distributed.harness import run_ranks
from tests.distributed.test_layout_parity import pairwise
from tests.models import SMALL, build, distance, load, perturbed, tensors, worst

TOLERANCE = 1e-9
STEPS, SEQUENCES, LENGTH = 3, 8, 7
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]
AXES: dict[str, list[Any]] = {
    "layout": [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)],  # tp, pp, dp
    "schedule": SCHEDULES,
    "recompute": ["none", "latent"],
    "overlap": ["none", "weight_grads", "split_batch"],
    "linear": ["btp", "vanilla", "dense"],
    "tie_embeddings": [True, False],
    "zero": [0, 1, 2, 3],
}
Case = dict[str, Any]


class Outcome(NamedTuple):
    """Of every step its loss, gradient norm and clipped canonical gradients; the weights after the last."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def product() -> list[Case]:
    cases = []
    for values in itertools.product(*AXES.values()):
        case = dict(zip(AXES, values, strict=True))
        if case["schedule"] in ZERO_BUBBLE and (case["recompute"] != "none" or case["overlap"] == "weight_grads"):
            continue
        if case["zero"] and case["layout"][2] == 1:
            continue
        if case["zero"] == 3 and (case["overlap"] == "split_batch" or case["schedule"] in ZERO_BUBBLE):
            continue
        if case["linear"] == "dense" and case["recompute"] == "latent":
            continue
        if case["overlap"] == "split_batch" and case["linear"] != "btp":
            continue
        if case["overlap"] != "none" and case["layout"][0] == 1:
            continue  # there is nothing to hide
        if case["layout"] == (2, 2, 2) and case["linear"] != "btp":
            continue  # eight processes are slow; the others have these
        cases.append(case)
    return cases


def config(case: Case, layout: tuple[int, int, int]) -> TrainConfig:
    """GQA with biases where the table is tied; sizes that tp and the stages do not divide."""
    tp, pp, dp = layout
    dense, tied = case["linear"] == "dense", case["tie_embeddings"]
    model = {
        **SMALL,
        "linear": "dense" if dense else "low_rank",
        "rank": None if dense else 6,
        "layers": case.get("layers", case["layout"][1] * STAGES_PER_RANK.get(case["schedule"], 1) + 1),
        "ffn_size": 43,
        "vocab_size": 51,
        "kv_heads": 2 if tied else 4,
        "attention_bias": tied,
        "mlp_bias": tied,
        "tie_embeddings": tied,
        "dropout": case.get("dropout", 0.0),
        "crossing": case.get("crossing", "none"),
    }
    parallel = {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "pipeline_schedule": case["schedule"],
        "overlap": case["overlap"] if pp > 1 else "none",
        "zero": case["zero"] if pp > 1 else 0,
    }
    if case["linear"] == "vanilla":
        parallel["tensor_layout"] = "vanilla"
    return TrainConfig.from_dict(
        {
            "model": model,
            "parallel": parallel,
            "train": {
                "precision": "fp64",
                "sequence_length": LENGTH,
                "global_batch_size": SEQUENCES,
                "micro_batch_size": case.get("micro", 2),
                "recompute": case["recompute"] if pp > 1 else "none",
            },
        }
    )


def batches(config: TrainConfig, mesh: Mesh) -> list[Batch]:
    """Random tokens. Most labels of the first sequences are ignored, all of the first two, few of the last."""
    generator = torch.Generator().manual_seed(3)
    micro, out = config.train.micro_batch_size, []
    for step in range(STEPS):
        ids = torch.randint(config.model.vocab_size, (SEQUENCES, LENGTH + 1), generator=generator)
        ignored = torch.rand(SEQUENCES, LENGTH, generator=generator) < torch.linspace(1.0, 0.0, SEQUENCES)[:, None]
        ignored[:2] = True
        labels = ids[:, 1:].masked_fill(ignored, -100)
        share = SEQUENCES // mesh.dp.size
        micro_batches = [
            MicroBatch(
                ids[start : start + micro, :-1],
                labels[start : start + micro],
                range(step * SEQUENCES + start, step * SEQUENCES + start + micro),
            )
            for start in range(mesh.dp.rank * share, (mesh.dp.rank + 1) * share, micro)
        ]
        out.append(Batch(micro_batches, int((labels != -100).sum()), ""))
    return out


def train(mesh: Mesh, case: Case) -> Outcome:
    """Three steps with clipping at work, from weights under which mistakes show."""
    settings = config(case, (mesh.tp.size, mesh.pp.size, mesh.dp.size))
    if settings.parallel.zero:
        mesh = replace(mesh, shards=mesh.dp, replicas=Group())
    model = build_model(settings, mesh)
    load(model, perturbed(tensors(build(settings.model))), mesh.tp)
    optimizer = build_adamw(model, settings.optimizer)
    outcome = Outcome([], [], [], {})
    step = optimizer.step

    def recorded(*args: Any) -> None:
        outcome.gradients.append(tensors(model, gradients=True, tp=mesh.tp, shards=mesh.shards))
        step(*args)

    optimizer.step = recorded  # type: ignore[method-assign, assignment]
    for number, batch in enumerate(batches(settings, mesh)):
        loss, norm = update(model, optimizer, batch, 0.01, 0.5, mesh, number, zero=settings.parallel.zero)
        outcome.losses.append(loss)
        outcome.norms.append(norm)
    outcome.weights.update(tensors(model, tp=mesh.tp, shards=mesh.shards))
    return outcome


def train_all(mesh: Mesh, cases: Sequence[Case]) -> list[Outcome]:
    return [train(mesh, case) for case in cases]


def check(case: Case, ranks: Sequence[Outcome], reference: Outcome, tolerance: float = TOLERANCE) -> None:
    """Every rank has the reference's numbers, and all ranks together have every tensor of it."""
    assert min(reference.norms) > 0.5, "clipping must be at work"
    for rank in ranks:
        for name in ("losses", "norms"):
            for value, expected in zip(getattr(rank, name), getattr(reference, name), strict=True):
                assert value == pytest.approx(expected, rel=tolerance), (case, name)
        for held, whole in [*zip(rank.gradients, reference.gradients, strict=True), (rank.weights, reference.weights)]:
            error, tensor = worst(held, {name: whole[name] for name in held})
            assert error <= tolerance, (case, tensor, error)
    assert set().union(*(rank.weights for rank in ranks)) == reference.weights.keys()


def chosen() -> list[Case]:
    return product() if os.environ.get("BOOST_FULL_PARITY") else pairwise(product())


@pytest.mark.timeout(1800)  # the full product of eight processes takes minutes
@pytest.mark.parametrize("layout", AXES["layout"], ids=str)
def test_pipelines_equal_the_single_process(layout: tuple[int, int, int]) -> None:
    cases = [case for case in chosen() if case["layout"] == layout]
    assert len(cases) >= 5
    tp, pp, dp = layout
    results = run_ranks(tp * pp * dp, train_all, cases, layout=(pp, dp, tp))
    for number, case in enumerate(cases):
        check(case, [rank[number] for rank in results], train(Mesh(), case))


CROSSED: list[Case] = [
    {**dict(zip(AXES, values, strict=True)), "crossing": crossing}
    for crossing, *values in [
        ("tensor", (2, 2, 1), "1f1b", "latent", "weight_grads", "btp", True, 0),
        ("dense", (2, 2, 1), "zbv", "none", "none", "btp", False, 0),
        ("identity", (2, 2, 1), "interleaved_1f1b", "none", "none", "btp", False, 0),
        ("diagonal", (1, 2, 2), "gpipe", "none", "none", "btp", True, 3),
    ]
]


@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_stages_hand_bottlenecks_on(layout: tuple[int, int, int]) -> None:
    """Crossings do not end at a boundary; there rank 6 at seven linears is divided over tp."""
    cases = [case for case in CROSSED if case["layout"] == layout]
    tp, pp, dp = layout
    results = run_ranks(tp * pp * dp, train_all, cases, layout=(pp, dp, tp))
    for number, case in enumerate(cases):
        check(case, [rank[number] for rank in results], train(Mesh(), case))


PLAIN: Case = {
    "layout": (1, 2, 1),
    "schedule": "1f1b",
    "recompute": "none",
    "overlap": "none",
    "linear": "btp",
    "tie_embeddings": False,
    "zero": 0,
}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_dropout_masks_follow_the_samples(schedule: str) -> None:
    """At equal tp, whatever the stage, the micro-batch and the dp rank."""
    case = {**PLAIN, "schedule": schedule, "dropout": 0.2}
    check(case, run_ranks(2, train, case, layout=(2, 1, 1)), train(Mesh(), case))
    check(case, run_ranks(2, train, {**case, "micro": 1}, layout=(2, 1, 1)), train(Mesh(), case))


def test_fewer_micro_batches_than_stages() -> None:
    cases = [
        {**PLAIN, "schedule": schedule, "micro": micro, "layout": (1, 4, 1)}
        for schedule in ("gpipe", "interleaved_1f1b", "zero_bubble", "zbv")
        for micro in (8, 4)
    ]
    results = run_ranks(4, train_all, cases, layout=(4, 1, 1))
    for number, case in enumerate(cases):
        check(case, [rank[number] for rank in results], train(Mesh(), case))


def second_step(mesh: Mesh, case: Case) -> Counter[tuple[str, int]]:
    """What the second step sends and reduces, by name and elements."""
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
    assert all(c.bytes == 8 * c.elements for c in seen if c.name.rstrip("_") in ("send", "recv")), "fp64"
    return Counter((c.name.rstrip("_"), c.elements) for c in seen)


def _recorded(function: Any, name: str, ran: list[Action]) -> Any:
    def run(stage: PipelineStage, chunk: int, *args: Any, **kwargs: Any) -> Any:
        split = kwargs.get("full_backward") is False
        kind = {"forward_one_chunk": "F", "backward_one_chunk": "I" if split else "B"}.get(name, "W")
        ran.append(Action(kind, stage.stage_index, chunk))
        return function(stage, chunk, *args, **kwargs)

    return run


def second_steps(mesh: Mesh, case: Case) -> dict[str, Counter[tuple[str, int]]]:
    """By schedule."""
    return {schedule: second_step(mesh, {**case, "schedule": schedule}) for schedule in SCHEDULES}


TIED: Case = {**PLAIN, "layers": 5, "tie_embeddings": True}


@pytest.fixture(scope="module")
def traffic() -> list[dict[str, Counter[tuple[str, int]]]]:
    """Of every rank of two stages and two tp ranks."""
    return run_ranks(4, second_steps, TIED, layout=(2, 1, 2))


def test_what_crosses_a_stage(traffic: list[dict[str, Counter[tuple[str, int]]]]) -> None:
    """A micro-batch's shard of the residual stream, n d / tp elements, once forward and once backward per boundary."""
    shard, micro_batches = 2 * LENGTH * SMALL["hidden_size"] // 2, SEQUENCES // 2
    table = 26 * SMALL["hidden_size"]  # half of 51 rows, padded
    for rank in traffic:
        for schedule, seen in rank.items():
            # Forward the rank before a boundary sends, backward the one after it. Of zbv's three boundaries the middle
            # one lies within a rank, and its first and last stage are on one rank and share their table.
            expected = {shard: {"interleaved_1f1b": 3, "zbv": 2}.get(schedule, 1) * micro_batches}
            if schedule != "zbv":
                expected[table] = 1
            for kind in ("send", "recv"):
                assert {n: times for (name, n), times in seen.items() if name == kind} == expected, schedule


def test_schedules_repeat_no_collective(traffic: list[dict[str, Counter[tuple[str, int]]]]) -> None:
    """Whatever the order, and where backward is split in two, tp ranks reduce what they would reduce without pp."""
    alone = run_ranks(2, second_step, TIED)[0]
    assert sum(alone.values()) > 100
    for schedule in SCHEDULES:
        together = sum((rank[schedule] for rank in traffic[::2]), Counter())
        assert {kind: n for kind, n in together.items() if kind[0] not in ("send", "recv")} == alone, schedule


def reduced(mesh: Mesh, zero: int, linear: str, tied: bool) -> list[tuple[Counter[tuple[str, int, int]], Tensor]]:
    """In bf16 under 1f1b and a zero-bubble schedule: what a second step sends over dp, and its gradients.

    First the gradients in fp64.
    """
    out: list[tuple[Counter[tuple[str, int, int]], Tensor]] = []
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


def reduced_elements(sent: Counter[tuple[str, int, int]]) -> int:
    """Of all reduce-scatters, which are in fp32."""
    scatters = [(elements, size, times) for (name, elements, size), times in sent.items() if name == "reduce_scatter"]
    assert all(size == 4 * elements for elements, size, _ in scatters)
    return sum(elements * times for elements, _, times in scatters)


def others(sent: Counter[tuple[str, int, int]]) -> Counter[tuple[str, int, int]]:
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
