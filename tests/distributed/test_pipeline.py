"""Pipelines equal the single process: loss, gradient norm, every gradient, weights after 3 steps, in float64."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from boost.config import TrainConfig
from boost.config_rules import STAGES_PER_RANK, ZERO_BUBBLE
from boost.model.stages import PipelinedDecoder
from boost.parallel.mesh import Group, Mesh
from boost.parallel.sharding import held_rows
from boost.training.batches import Batch, MicroBatch
from boost.training.loop import build_model, update
from boost.training.optimizers.adamw import build_adamw
from tests.distributed.harness import run_ranks
from tests.distributed.test_layout_parity import EXTRAS, pairwise
from tests.models import SMALL, build, load, perturbed, tensors, worst

FULL = bool(os.environ.get("BOOST_FULL_PARITY"))
TOLERANCE = 1e-9
STEPS, SEQUENCES, LENGTH = 3, 8, 7
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]
AXES: dict[str, list[Any]] = {
    "layout": [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)],  # tp, pp, dp
    "schedule": SCHEDULES,
    "recompute": ["none", "latent", "block"],
    "overlap": ["none", "weight_grads", "split_batch"],
    "linear": ["btp", "vanilla", "vanilla_sharded_heads", "dense"],
    "tie_embeddings": [True, False],
    "zero": [0, 1, 2, 3],
    "extra": list(EXTRAS),
}
Case = dict[str, Any]


PLAIN: Case = {
    "layout": (1, 2, 1),
    "schedule": "1f1b",
    "recompute": "none",
    "overlap": "none",
    "linear": "btp",
    "tie_embeddings": False,
    "zero": 0,
    "extra": "none",
}


class Outcome(NamedTuple):
    """Of every step its loss, gradient norm and clipped canonical gradients; the weights after the last."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def product() -> list[Case]:
    """Every composition that the configuration allows, but for eight processes, which are slow."""
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
        if case["overlap"] == "split_batch" and (case["linear"] != "btp" or case["recompute"] == "block"):
            continue
        if case["overlap"] != "none" and case["layout"][0] == 1:
            continue  # there is nothing to hide
        if case["layout"] == (2, 2, 2) and case["linear"] != "btp" and case["schedule"] not in ("1f1b", "zbv"):
            continue  # eight processes are slow; the others have these
        bridge = case["extra"] not in ("none", "ungrouped")
        if bridge and (case["linear"] != "btp" or case["layout"][0] == 1 or case["overlap"] == "split_batch"):
            continue  # these are about bridges, and split_batch has its own
        if bridge and case["zero"] in (1, 3):
            continue  # eight processes again; test_zero.py has all stages
        cases.append(case)
    return cases


def plain(case: Case) -> bool:
    """Whether the full product is taken of what this case is made of; the rest meets in pairs."""
    return (
        case["recompute"] != "block"
        and case["extra"] == "none"
        and case["linear"] in (("btp",) if case["layout"] == (2, 2, 2) else ("btp", "vanilla", "dense"))
    )


def config(case: Case, layout: tuple[int, int, int]) -> TrainConfig:
    """GQA with biases where the table is tied; sizes that tp and the stages do not divide.

    Args:
        layout: (1, 1, 1) is the reference: nothing recomputed, sharded or put off.
    """
    tp, pp, dp = layout
    alone = layout == (1, 1, 1)
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
        "overlap": "none" if alone else case["overlap"],
        "zero": 0 if alone else case["zero"],
        **({} if alone else EXTRAS[case["extra"]] | case.get("parallel", {})),
    }
    if case["linear"] in ("vanilla", "vanilla_sharded_heads"):
        parallel["tensor_layout"] = case["linear"]
    return TrainConfig.from_dict(
        {
            "model": model,
            "parallel": parallel,
            "train": {
                "precision": case.get("precision", "fp64"),
                "sequence_length": LENGTH,
                "global_batch_size": SEQUENCES,
                "micro_batch_size": case.get("micro", 2),
                "recompute": "none" if alone else case["recompute"],
                "compile": case.get("compile", False) and not alone,
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
    if settings.parallel.zero and settings.parallel.dp_replicate == 1:
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
    if settings.model.tie_embeddings and isinstance(model, PipelinedDecoder):
        check_twins(model, mesh)
    return outcome


def check_twins(model: PipelinedDecoder, mesh: Mesh) -> None:
    """Both ends of the stack have the same table, to the bit, in what this rank and its pp peers hold of it."""
    tables = [model.decoders[0].embedding] if model.pipeline.holds_first else []
    tables += [model.decoders[-1].head] if model.pipeline.holds_last else []
    everyone: list[Any] = [None] * mesh.pp.size
    mine = [held_rows(cast(Tensor, table.weight))[0].detach().numpy() for table in tables]
    dist.all_gather_object(everyone, mine, group=mesh.pp.process_group)
    embedding, head = itertools.chain(*everyone)
    assert embedding.shape == head.shape
    assert embedding.tobytes() == head.tobytes()


def train_all(mesh: Mesh, cases: Sequence[Case]) -> list[Outcome]:
    return [train(mesh, case) for case in cases]


def check(case: Case, ranks: Sequence[Outcome], reference: Outcome, tolerance: float = TOLERANCE) -> None:
    """Every rank has the reference's numbers, loss and norm to the bit the same as any other, and all ranks together
    have every tensor of it."""
    assert min(reference.norms) > 0.5, "clipping must be at work"
    for rank in ranks:
        assert (rank.losses, rank.norms) == (ranks[0].losses, ranks[0].norms), case
        for name in ("losses", "norms"):
            for value, expected in zip(getattr(rank, name), getattr(reference, name), strict=True):
                assert value == pytest.approx(expected, rel=tolerance), (case, name)
        for held, whole in [*zip(rank.gradients, reference.gradients, strict=True), (rank.weights, reference.weights)]:
            error, tensor = worst(held, {name: whole[name] for name in held})
            assert error <= tolerance, (case, tensor, error)
    assert set().union(*(rank.weights for rank in ranks)) == reference.weights.keys()


def chosen() -> list[Case]:
    cases = pairwise(product())
    return cases + [case for case in product() if plain(case) and case not in cases] if FULL else cases


@pytest.mark.timeout(1800)  # the full product of eight processes takes minutes
@pytest.mark.parametrize("layout", AXES["layout"], ids=str)
def test_pipelines_equal_the_single_process(layout: tuple[int, int, int]) -> None:
    cases = [case for case in chosen() if case["layout"] == layout]
    assert len(cases) >= 5
    tp, pp, dp = layout
    results = run_ranks(tp * pp * dp, train_all, cases, layout=(pp, dp, tp))
    for number, case in enumerate(cases):
        check(case, [rank[number] for rank in results], train(Mesh(), case))


def replicated() -> list[Case]:
    """HSDP under every schedule and stage that go together; eight processes, so the covering set takes two of them."""
    cases: list[Case] = [
        {
            **PLAIN,
            "layout": (1, 2, 4),
            "schedule": schedule,
            "zero": zero,
            "tie_embeddings": (zero + len(schedule)) % 2 == 0,
            "linear": "dense" if schedule == "gpipe" else "btp",
            "recompute": "latent" if schedule == "1f1b" else "none",
            "parallel": {"dp_replicate": 2},
            "micro": 1,
        }
        for schedule, zero in itertools.product(SCHEDULES, (1, 2, 3))
        if zero == 1 or schedule not in ZERO_BUBBLE
    ]
    return cases if FULL else [c for c in cases if (c["schedule"], c["zero"]) in (("1f1b", 2), ("zbv", 1))]


@pytest.mark.timeout(600)
def test_replicas_of_shards_of_stages() -> None:
    cases = replicated()
    assert {case["tie_embeddings"] for case in cases} == {True, False} if FULL else len(cases) == 2
    results = run_ranks(8, train_all, cases, layout=(2, 4, 1), shards=2)
    for number, case in enumerate(cases):
        check(case, [rank[number] for rank in results], train(Mesh(), case))


CROSSED: list[Case] = [
    {**dict(zip(AXES, values, strict=True)), "crossing": crossing}
    for crossing, *values in [
        ("tensor", (2, 2, 1), "1f1b", "latent", "weight_grads", "btp", True, 0, "none"),
        ("dense", (2, 2, 1), "zbv", "none", "none", "btp", False, 0, "none"),
        ("identity", (2, 2, 1), "interleaved_1f1b", "none", "none", "btp", False, 0, "none"),
        ("diagonal", (1, 2, 2), "gpipe", "none", "none", "btp", True, 3, "none"),
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
