"""dp, ZeRO, HSDP and tp equal one process: loss, every gradient, the norm, the weights after 3 steps, in float64."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boost.bench.memory import track_storages
from boost.config import ModelSection, OptimizerSection, ParallelSection, TrainConfig
from boost.inference.generate import generate
from boost.model.blocks.bottleneck import BottleneckBlock
from boost.model.decoder import Decoder
from boost.model.stages import PipelinedDecoder
from boost.parallel import mesh as meshes
from boost.parallel.collectives import Collective, count_collectives
from boost.parallel.data_parallel import sum_gradients
from boost.parallel.mesh import Group, Mesh
from boost.parallel.zero import begin_micro_batch
from boost.training.batches import Batch, MicroBatch
from boost.training.loop import build_model, forward_backward, update
from boost.training.optimizers.adamw import build_adamw
from tests.distributed.harness import run_ranks
from tests.distributed.test_layout_parity import EXTRAS, pairwise
from tests.models import build, distance, load, model_section, perturbed, tensors, worst

TOLERANCE = 1e-9
FULL = bool(os.environ.get("BOOST_FULL_PARITY"))
BATCH, STEPS = 16, 3
LAYOUTS = {  # dp, tp, dp_replicate
    "dp4": (4, 1, 1),
    "dp2 tp2": (2, 2, 1),
    "hsdp": (4, 1, 2),
    "tp4": (1, 4, 1),
    "hsdp tp2": (4, 2, 2),
}
AXES: dict[str, list[Any]] = {
    "ranks": list(LAYOUTS)[:4],
    "zero": [0, 1, 2, 3],
    "layout": ["btp", "vanilla", "vanilla_sharded_heads", "dense", "dense_sequence_parallel"],
    "recompute": ["none", "latent", "block"],
    "overlap": ["none", "weight_grads", "split_batch"],
    "micro_batches": [1, 2],
    "tied_and_gqa": [True, False],
    "extra": list(EXTRAS),
}


def product() -> list[dict[str, Any]]:
    """Every composition that the configuration allows, and in which every option has an effect."""
    cases = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    return [
        case
        for case in cases
        if not (case["ranks"] == "hsdp" and case["zero"] == 0)
        and not (case["ranks"] == "tp4" and case["zero"])
        and not (case["layout"].startswith("dense") and case["recompute"] == "latent")
        and not (
            case["overlap"] == "split_batch"
            and (case["layout"] != "btp" or case["recompute"] == "block" or case["zero"] == 3)
        )
        # Overlap hides what tp communicates.
        and not (case["overlap"] != "none" and LAYOUTS[case["ranks"]][1] == 1)
        and not (case["layout"] == "dense_sequence_parallel" and LAYOUTS[case["ranks"]][1] == 1)
        # The other extras are about bridges, and split_batch has its own.
        and not (
            case["extra"] not in ("none", "ungrouped")
            and (LAYOUTS[case["ranks"]][1] == 1 or case["layout"] != "btp" or case["overlap"] == "split_batch")
        )
    ]


def chosen() -> list[dict[str, Any]]:
    """Every pair of options; in full the product too, but for what only changes how a layout computes."""
    cases = pairwise(product()) + MORE
    if not FULL:
        return cases
    plain = [c for c in product() if c["extra"] == "none" and c["layout"] != "dense_sequence_parallel"]
    return cases + [case for case in plain if case not in cases]


# Three options meet here that pairs leave out: what a stage skips before the last micro-batch.
MORE: list[dict[str, Any]] = [
    dict(zip(AXES, values, strict=True))
    for values in [
        ("hsdp", 1, "btp", "latent", "none", 2, True, "none"),
        ("hsdp", 2, "btp", "none", "none", 2, True, "none"),
        ("dp2 tp2", 1, "btp", "latent", "weight_grads", 2, True, "none"),
        ("dp2 tp2", 3, "btp", "none", "weight_grads", 2, False, "none"),
        ("dp4", 3, "btp", "latent", "none", 2, True, "none"),
        ("tp4", 0, "btp", "latent", "weight_grads", 2, False, "none"),
    ]
]


def section(case: dict[str, Any]) -> ModelSection:
    """Sizes that divide neither over tp nor over dp, but for those that tp must divide.

    With one kv head of width 6, a dp rank of four holds nothing.
    """
    dense = case["layout"].startswith("dense")
    tp = LAYOUTS[case["ranks"]][1]
    heads = 8 if tp == 4 else 4
    return model_section(
        linear="dense" if dense else "low_rank",
        hidden_size=36 if tp == 4 else 34,
        ffn_size=43,
        vocab_size=51,
        heads=heads,
        kv_heads=tp if case["tied_and_gqa"] else heads,
        tie_embeddings=case["tied_and_gqa"],
        attention_bias=True,
        mlp_bias=not case["tied_and_gqa"],
        crossing=case.get("crossing", "none"),
    )


def batches(model: ModelSection) -> list[tuple[Tensor, Tensor]]:
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
    gradients: list[dict[str, Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(tensors(model, gradients=True, shards=mesh.shards)))
    losses, norms = [], []
    per_rank = BATCH // mesh.dp.size
    for step, (ids, labels) in enumerate(batches(model.model)):
        mine = range(mesh.dp.rank * per_rank, (mesh.dp.rank + 1) * per_rank)
        micro = [MicroBatch(ids[i], labels[i], range(i[0], i[-1] + 1)) for i in torch.tensor(mine).chunk(micro_batches)]
        batch = Batch(micro, int((labels != -100).sum()), "")
        loss, norm = update(model, optimizer, batch, 1e-2, 0.5, mesh, step, zero=zero)
        losses.append(loss), norms.append(norm)
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "norms": torch.tensor(norms, dtype=torch.float64),
        "gradients": gradients,
        "weights": tensors(model, shards=mesh.shards),
    }


def config(case: dict[str, Any], precision: str = "fp64") -> TrainConfig:
    dp, tp, replicate = LAYOUTS[case["ranks"]]
    layout: dict[str, Any] = {"tensor_layout": case["layout"]}
    if case["layout"].startswith("dense"):
        layout = {"sequence_parallel": case["layout"] == "dense_sequence_parallel"}
    parallel = {
        "dp": dp,
        "tp": tp,
        "dp_replicate": replicate,
        "zero": case["zero"],
        "overlap": case["overlap"],
        **layout,
        **EXTRAS[case["extra"]],
    }
    train = {
        "precision": precision,
        "recompute": case["recompute"],
        "global_batch_size": BATCH,
        "micro_batch_size": BATCH // dp // case["micro_batches"],
    }
    model = section(case).model_dump()
    return TrainConfig.from_dict({"model": model, "train": train, "parallel": parallel})


def compare(mesh: Mesh, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case the errors against one process, and the losses and norms themselves."""
    out = []
    references: dict[Any, Any] = {}
    grids: dict[Any, Mesh] = {}  # made once: every group keeps threads of its own
    for case in cases:
        key = section(case).model_dump_json()
        if key not in references:
            single = build(section(case), ParallelSection(group_linears=False))
            weights = perturbed(tensors(single))
            load(single, weights)
            references[key] = weights, run_steps(single, Mesh(), 1, 0)
        weights, expected = references[key]

        settings = config(case)
        parallel = settings.parallel
        sizes = parallel.dp, parallel.tp, parallel.shards
        if sizes not in grids:
            grids[sizes] = meshes.build(1, parallel.dp, parallel.tp, torch.device("cpu"), 60, parallel.shards)
        grid = grids[sizes]
        model = build_model(settings, grid)
        assert type(next(model.parameters())).__name__ == ("DTensor" if case["zero"] else "Parameter")
        load(model, weights)
        found = run_steps(model, grid, case["micro_batches"], case["zero"])
        errors = {name: distance(found[name], expected[name]) for name in ("losses", "norms")}
        errors["weights"], _ = worst(found["weights"], expected["weights"])
        for step in range(STEPS):
            error, name = worst(found["gradients"][step], expected["gradients"][step])
            errors[f"gradient {name} of step {step}"] = error
        reported = [found["losses"].tolist(), found["norms"].tolist()]
        out.append({"case": case, "errors": errors, "reported": reported})
    return out


def check(results: list[list[dict[str, Any]]]) -> None:
    """On every rank nothing is further than the tolerance from one process, and all have the same losses and norms, to
    the bit."""
    for rank in results:
        for outcome, first in zip(rank, results[0], strict=True):
            assert all(error <= TOLERANCE for error in outcome["errors"].values()), outcome
            assert outcome["reported"] == first["reported"], outcome["case"]


@pytest.mark.timeout(1800)  # the full product is hundreds of cases; a rank that waits in vain ends after 60 s anyway
@pytest.mark.parametrize("ranks", AXES["ranks"])
def test_zero_equals_single_process(ranks: str) -> None:
    cases = [case for case in chosen() if case["ranks"] == ranks]
    assert len(cases) >= 6
    check(run_ranks(4, compare, cases))


def test_replicas_of_shards_of_tp_ranks() -> None:
    """HSDP with tp, on eight processes."""
    case = dict(zip(AXES, ("hsdp tp2", 3, "btp", "latent", "weight_grads", 2, True, "none"), strict=True))
    check(run_ranks(8, compare, [case]))


CROSSED: list[dict[str, Any]] = [
    {**dict(zip(AXES, values, strict=True)), "crossing": crossing}
    for crossing, *values in [
        ("tensor", "dp2 tp2", 3, "btp", "latent", "weight_grads", 2, True, "none"),
        ("dense", "dp2 tp2", 1, "btp", "block", "none", 2, False, "none"),
        ("diagonal", "dp4", 3, "btp", "none", "none", 1, False, "none"),
    ]
]


def test_crossings_are_sharded_too() -> None:
    """A gate lies in the block below its own, where it runs."""
    check(run_ranks(4, compare, CROSSED))


def infer(mesh: Mesh, zero: int) -> None:
    """Generation and a forward pass without gradients agree with one process, and leave the weights shared."""
    case = dict(zip(AXES, ("dp2 tp2", zero, "btp", "none", "none", 1, True, "none"), strict=True))
    settings = config(case)
    grid = meshes.build(1, 2, 2, torch.device("cpu"), 60, settings.parallel.shards)
    single, model = build(section(case)), build_model(settings, grid)
    weights = perturbed(tensors(single))
    load(single, weights)
    load(model, weights)
    assert list(generate(model, [1, 2, 3], 6)) == list(generate(single, [1, 2, 3], 6))
    assert worst(tensors(model, shards=grid.shards), weights)[0] == 0
    ids, labels = batches(model.model)[0]
    with torch.no_grad():
        assert distance(model.loss(ids, labels), single.loss(ids, labels)) < TOLERANCE


@pytest.mark.parametrize("zero", [1, 3])
def test_sharded_models_generate(zero: int) -> None:
    run_ranks(4, infer, zero)


# --- What a stage promises: traffic and memory ---

LAYERS, WIDTH = 3, 128


def larger(sizes: tuple[int, int, int], zero: int, replicate: int, layers: int) -> TrainConfig:
    """A bf16 model whose weights are many and whose few tokens make few activations, at sizes (pp, dp, tp)."""
    pp, dp, tp = sizes
    model = {"hidden_size": WIDTH, "ffn_size": 2 * WIDTH, "layers": layers, "heads": 4, "rank": 32, "vocab_size": 16}
    train = {
        "global_batch_size": 2 * dp,
        "micro_batch_size": 1,
        "sequence_length": 2,
        "precision": "bf16",
        "recompute": "block",
    }
    parallel = {"pp": pp, "dp": dp, "tp": tp, "zero": zero, "dp_replicate": replicate}
    return TrainConfig.from_dict({"model": model, "train": train, "parallel": parallel})


class Training:
    """A model and its optimiser, ready to go through two micro-batches, at once or one by one."""

    def __init__(self, settings: TrainConfig, mesh: Mesh) -> None:
        self.zero, self.mesh = settings.parallel.zero, mesh
        self.model = build_model(settings, self.mesh)
        self.optimizer = build_adamw(self.model, settings.optimizer)
        self.ids = torch.randint(16, (1, 2))

    def micro_batch(self, *, last: bool) -> None:
        if self.zero:
            begin_micro_batch(self.model, self.zero, last=last)
        (self.model.loss(self.ids, self.ids) / 2).backward()
        if self.model.queue is not None:
            self.model.queue.flush()

    def both(self) -> None:
        micro_batches = [MicroBatch(self.ids, self.ids, range(n, n + 1)) for n in range(2)]
        forward_backward(self.model, Batch(micro_batches, 4, ""), self.mesh, self.zero)

    @property
    def parameters(self) -> int:
        """The number of parameters of what all dp ranks of this tp and pp rank hold."""
        return sum(p.numel() for p in self.model.parameters())


def traffic(mesh: Mesh) -> list[tuple[int, int, int, list[list[Collective]]]]:
    """Stage, replicas, number of parameters, and the collectives of each of three micro-batches."""
    out = []
    grids = {replicate: meshes.build(1, 4, 1, torch.device("cpu"), 60, 4 // replicate) for replicate in (1, 2)}
    for zero, (replicate, grid) in itertools.product([1, 2, 3], grids.items()):
        training = Training(larger((1, 4, 1), zero, replicate, LAYERS), grid)
        seen = []
        for micro in range(3):
            with count_collectives() as collectives:
                training.micro_batch(last=micro == 2)
            seen.append(list(collectives))
        out.append((zero, replicate, training.parameters, seen))
    return out


def test_accumulation_communicates_no_more_than_the_stage_needs() -> None:
    """Stages 1 and 2 gather weights once per step, in bf16; gradients are reduced in fp32, in stage 1 once."""
    units = LAYERS + 1
    for zero, replicate, parameters, micro_batches in itertools.chain(*run_ranks(4, traffic)):
        for number, seen in enumerate(micro_batches):
            last = number == 2
            expected = {
                # Stage 3 gathers blocks twice, the embedding, norm and head once.
                "all_gather": (2 * units - 1 if zero == 3 else units if number == 0 else 0, 2),
                "reduce_scatter": (units if zero > 1 or last else 0, 4),
                "all_reduce": (units if replicate > 1 and last else 0, 4 / (4 // replicate)),
            }
            assert {c.name for c in seen} == {name for name, (calls, _) in expected.items() if calls}
            for name, (calls, size) in expected.items():
                mine = [c for c in seen if c.name == name]
                assert len(mine) == calls, (zero, replicate, name, number)
                if calls == units:
                    assert sum(c.bytes for c in mine) == size * parameters


def summed(mesh: Mesh) -> tuple[int, list[Collective]]:
    """The number of parameters, and the collectives of a step of two micro-batches without ZeRO."""
    training = Training(larger((1, 2, 1), 0, 1, LAYERS), mesh)
    micro_batches = [MicroBatch(training.ids, training.ids, range(n, n + 1)) for n in range(2)]
    with count_collectives() as seen:
        update(training.model, training.optimizer, Batch(micro_batches, 8, ""), 1e-3, 1.0, mesh, 1)
    return training.parameters, list(seen)


def test_without_zero_gradients_are_summed_once_per_step() -> None:
    """In fp32, and nothing else is sent but a few numbers."""
    for parameters, seen in run_ranks(2, summed, layout=(1, 2, 1)):
        assert [(c.name, c.bytes) for c in seen if c.elements > 8] == [("all_reduce", 4 * parameters)]


SIZES = {"dp4": (1, 4, 1), "dp2 tp2": (1, 2, 2), "dp2 pp2": (2, 2, 1)}  # pp, dp, tp


def held_between_micro_batches(mesh: Mesh) -> list[list[float]]:
    """For each stage this rank's live bytes per parameter before the last micro-batch's backward pass."""
    return [_held(replace(mesh, shards=mesh.dp, replicas=Group()) if zero else mesh, zero) for zero in range(4)]


def _held(mesh: Mesh, zero: int) -> list[float]:
    settings = larger((mesh.pp.size, mesh.dp.size, mesh.tp.size), zero, 1, LAYERS * mesh.pp.size)
    held: list[int] = []
    before = PipelinedDecoder._before_backward

    def look(model: PipelinedDecoder, stage: nn.Module, last: bool) -> None:
        if last:
            held.append(tracker.live_bytes())
        before(model, stage, last)

    with track_storages() as tracker, pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelinedDecoder, "_before_backward", look)
        training = Training(settings, mesh)
        if isinstance(training.model, PipelinedDecoder):
            training.both()
        else:
            training.micro_batch(last=False)
            held.append(tracker.live_bytes())
    return [size / training.parameters for size in held]


@pytest.mark.parametrize("layout", list(SIZES))
def test_memory_of_each_stage(layout: str) -> None:
    """What a rank holds while it accumulates gradients, per parameter of its tp and pp rank; so without activations.

    fp32 masters and two moments (12 bytes), fp32 gradients (4), and, gathered, bf16 weights (2). Without ZeRO no bf16
    copy is kept, it is made where it is used: 16 bytes and not 18.
    """
    dp = SIZES[layout][1]
    for found in run_ranks(4, held_between_micro_batches, layout=SIZES[layout]):
        for held, expected in zip(found, [16, 6 + 12 / dp, 2 + 16 / dp, 16 / dp], strict=True):
            assert held == pytest.approx([expected], rel=0.01)


def peak_of_a_step(mesh: Mesh) -> tuple[float, float]:
    """The most live bytes in a step under stage 3, and what is promised."""
    grid = replace(mesh, shards=mesh.dp, replicas=Group())
    sizes = mesh.pp.size, mesh.dp.size, mesh.tp.size
    with track_storages() as tracker:
        training = Training(larger(sizes, 3, 1, 20 * mesh.pp.size), grid)
        tracker.sample = True
        training.both() if mesh.pp.size > 1 else training.micro_batch(last=True)
        training.optimizer.step()
    block = next(module for module in training.model.modules() if isinstance(module, BottleneckBlock))
    unit = sum(p.numel() for p in block.parameters())
    return tracker.peak, 16 / mesh.dp.size * training.parameters + 2 * unit


@pytest.mark.parametrize("sizes", list(SIZES.values()) if FULL else [(1, 2, 1)], ids=str)
def test_peak_of_stage_3(sizes: tuple[int, int, int]) -> None:
    """Over a whole step: 16 P / N, and the largest unit's gathered weights.

    Within a tenth: the next unit, gathered ahead, and a unit's gradients on their way are there too.
    """
    for found, promised in run_ranks(math.prod(sizes), peak_of_a_step, layout=sizes):
        assert 0.99 < found / promised < 1.1


def bf16_errors(mesh: Mesh) -> list[float]:
    """For each stage, how far bf16 gradients of two micro-batches, summed over dp 2, are from fp64 ones."""

    def gradients(precision: str, stage: int) -> Tensor:
        settings = config(
            dict(zip(AXES, ("dp2 tp2", stage, "btp", "none", "none", 2, True, "none"), strict=True)),
            precision=precision,
        )
        grid = meshes.build(1, 2, 2, torch.device("cpu"), 60, settings.parallel.shards)
        model = build_model(settings, grid)
        assert {p.dtype for p in model.parameters()} == {torch.float64 if precision == "fp64" else torch.float32}
        ids, labels = batches(model.model)[0]
        mine = torch.arange(grid.dp.rank * 8, grid.dp.rank * 8 + 8)
        for half, last in zip(mine.chunk(2), (False, True), strict=True):
            if stage:
                begin_micro_batch(model, stage, last=last)
            (model.loss(ids[half], labels[half]) / (labels != -100).sum()).backward()
        if not stage:
            sum_gradients(model.parameters(), grid.dp)
        found = tensors(model, gradients=True, shards=grid.shards)
        return torch.cat([found[name].flatten() for name in sorted(found)])

    exact = gradients("fp64", 0)
    return [distance(gradients("bf16", stage), exact) for stage in range(4)]


def test_bf16_gradients_are_as_good_as_without_zero() -> None:
    """Weights are rounded to bf16 once, gradients summed in fp32, whatever the stage."""
    for plain, *sharded in run_ranks(4, bf16_errors):
        assert 1e-4 < plain < 0.02
        assert max(sharded) < 1.2 * plain
