"""ReLoRA against a training loop in plain torch: every layout, over steps that span a merge, in float64."""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config import ParallelSection, TrainConfig
from boost.config_rules import STAGES_PER_RANK, ZERO_BUBBLE
from boost.model.dropout import dropout
from boost.parallel import mesh as meshes
from boost.parallel.collectives import count_collectives
from boost.parallel.data_parallel import sum_gradients
from boost.parallel.mesh import Mesh
from boost.parallel.sharding import described, partial_parameters
from boost.training.batches import Batch, MicroBatch
from boost.training.loop import build_model, update
from boost.training.optimizers.adamw import build_adamw
from boost.training.restart import restart, steps_since_restart
from boost.training.schedule import lr_multiplier
from tests.distributed.harness import run_ranks
from tests.distributed.test_layout_parity import pairwise
from tests.models import (
    SMALL,
    build,
    distance,
    load,
    loss_and_gradients,
    model_section,
    perturbed,
    tensors,
    tokens,
    worst,
)
from tests.oracle import plain_loss

TOLERANCE, LATER = 1e-10, 1e-9  # of the first step; of what follows from rounded weights
STEPS, EVERY, SEQUENCES, LENGTH, SEED = 4, 2, 4, 7, 1
COMPARED = (0, 3)  # the steps whose gradients are looked at one by one
MERGED_AFTER = 3  # the update that runs at a learning rate of 0
SITES = {"q": "q, k, v", "k": "q, k, v", "v": "q, k, v", "o": "o", "gate": "gate, up", "up": "gate, up", "down": "down"}

AXES: dict[str, list[Any]] = {
    "layout": [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1)],  # pp, dp, tp
    "zero": [0, 1, 2, 3],
    "schedule": ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"],
    "overlap": ["none", "weight_grads"],
    "recompute": ["none", "block"],
    "micro": [1],
    "grouped": [True, False],
    "odd": [True, False],
    "lora_dropout": [0.0, 0.2],
}
Case = dict[str, Any]


def product() -> list[Case]:
    cases = []
    for values in itertools.product(*AXES.values()):
        case = dict(zip(AXES, values, strict=True))
        pp, dp, tp = case["layout"]
        if pp == 1 and case["schedule"] != "1f1b":
            continue
        if dp == 1 and case["zero"]:
            continue
        if tp == 1 and case["overlap"] != "none":
            continue
        bubble = pp > 1 and case["schedule"] in ZERO_BUBBLE
        if bubble and (case["zero"] == 3 or case["overlap"] != "none" or case["recompute"] != "none"):
            continue
        cases.append(case)
    return cases


def covering() -> list[Case]:
    """Every pair of options, but on pipelines only two ZeRO stages and the schedules that differ most."""
    return pairwise(
        [
            case
            for case in product()
            if case["layout"][0] == 1 or (case["schedule"] in ("1f1b", "zero_bubble", "zbv") and case["zero"] in (0, 2))
        ]
    )


def config(case: Case) -> TrainConfig:
    """Sizes that neither tp nor ZeRO divides; with `odd` GQA, tied tables and biases on q, k, v, o."""
    pp, dp, tp = case["layout"]
    odd, zero = case["odd"], case["zero"]
    model = {
        **SMALL,
        "linear": "relora",
        "rank": 5,
        "lora_alpha": 7.0,
        "lora_dropout": case["lora_dropout"],
        "dropout": case["lora_dropout"] / 2,
        "layers": 4 if pp > 1 and case["schedule"] in STAGES_PER_RANK else 2,
        "ffn_size": 43,
        "vocab_size": 51,
        "heads": 8 if odd else 4,
        "kv_heads": max(2, tp) if odd else 4,
        "attention_bias": odd,
        "mlp_bias": not odd,
        "tie_embeddings": odd,
    }
    parallel = {
        "pp": pp,
        "dp": dp,
        "tp": tp,
        "zero": zero,
        "dp_replicate": 2 if dp == 4 and zero == 2 else 1,
        "group_linears": case["grouped"],
        "overlap": case["overlap"],
        "pipeline_schedule": case["schedule"],
    }
    return TrainConfig.from_dict(
        {
            "model": model,
            "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "clip": 0.5, "restart_every": EVERY},
            "schedule": {"name": "jagged_cosine", "warmup_steps": 1, "restart_warmup_steps": 1},
            "train": {
                "steps": STEPS,
                "precision": "fp64",
                "seed": SEED,
                "sequence_length": LENGTH,
                "global_batch_size": SEQUENCES,
                "micro_batch_size": case["micro"],
                "recompute": case["recompute"],
            },
            "parallel": parallel,
        }
    )


def weights_of(settings: TrainConfig) -> dict[str, Tensor]:
    """Initial weights with gains, biases and B away from where they begin."""
    return perturbed(tensors(build(settings.model)))


def batches(settings: TrainConfig) -> list[tuple[Tensor, Tensor]]:
    """ids and labels; the first sequences have hardly a label, the last ones all."""
    generator = torch.Generator().manual_seed(5)
    out = []
    for _ in range(STEPS):
        ids = torch.randint(settings.model.vocab_size, (SEQUENCES, LENGTH + 1), generator=generator)
        labels = ids[:, 1:].clone()
        for row in range(SEQUENCES):
            labels[row, 2 * row + 1 :] = -100
        out.append((ids[:, :-1], labels))
    return out


def drawn(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1)


def forward(p: dict[str, Tensor], settings: TrainConfig, ids: Tensor, labels: Tensor, samples: range) -> Tensor:
    """The mean loss in plain torch. The masks are ours, which tests/model/test_dropout.py looks at."""
    model = settings.model
    assert model.rank is not None
    scale = model.lora_alpha / model.rank

    def dropped(x: Tensor, rate: float, layer: int, site: str) -> Tensor:
        return dropout(x.flatten(0, 1), rate, torch.tensor(samples), SEED, layer, site).view_as(x)

    def linear(x: Tensor, layer: int, name: str) -> Tensor:
        prefix = f"blocks.{layer}.{name}"
        read = dropped(x, model.lora_dropout, layer, SITES[name.split(".")[1]])
        z = F.linear(read, p[f"{prefix}.down.weight"])
        return F.linear(x, p[f"{prefix}.weight"], p.get(f"{prefix}.bias")) + scale * F.linear(
            z, p[f"{prefix}.up.weight"]
        )

    def drop(x: Tensor, layer: int, site: str) -> Tensor:
        return dropped(x, model.dropout, layer, site)

    return plain_loss(model, p, ids, labels, linear, drop)


def oracle(settings: TrainConfig, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Losses, norms, clipped gradients of every step, weights at the end, of training in plain torch."""
    model = settings.model
    pairs = [name.removesuffix(".weight") for name in weights if f"{name.removesuffix('.weight')}.up.weight" in weights]
    pairs = [prefix for prefix in pairs if f"{prefix}.down.weight" in weights]
    assert len(pairs) == 7 * model.layers
    frozen = {f"{prefix}.weight" for prefix in pairs}
    p = {name: value.clone().requires_grad_(name not in frozen) for name, value in weights.items()}
    trained = [value for name, value in p.items() if name not in frozen]
    optimizer = torch.optim.AdamW(
        [
            {"params": [value for value in trained if value.dim() > 1], "weight_decay": 0.1},
            {"params": [value for value in trained if value.dim() == 1], "weight_decay": 0.0},
        ]
    )
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for step, (ids, labels) in enumerate(batches(settings)):
        samples = range(step * SEQUENCES, (step + 1) * SEQUENCES)
        loss = forward(p, settings, ids, labels, samples)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        found["losses"].append(loss.item()), found["norms"].append(norm.item())
        found["gradients"].append({name: value.grad.clone() for name, value in p.items() if value.grad is not None})
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * lr_multiplier(settings.schedule, step, STEPS, restart_every=EVERY)
        assert (optimizer.param_groups[0]["lr"] == 0) == (step in (0, MERGED_AFTER - 1))
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == MERGED_AFTER:
            with torch.no_grad():
                for prefix in pairs:
                    up, down = p[f"{prefix}.up.weight"], p[f"{prefix}.down.weight"]
                    p[f"{prefix}.weight"] += 7.0 / 5 * up @ down
                    up.zero_()
                    bound = down.shape[1] ** -0.5
                    values = torch.empty(down.shape).uniform_(
                        -bound, bound, generator=drawn(f"{SEED}:{step + 1}:{prefix}.down.weight")
                    )
                    down.copy_(values)
                    for factor in (up, down):
                        del optimizer.state[factor]  # its moments, and its count of steps
    return {**found, "weights": {name: value.detach() for name, value in p.items()}}


def run_steps(model: Any, settings: TrainConfig, mesh: Mesh) -> dict[str, Any]:
    """The same of our training; of the parameters that this pipeline rank holds."""
    optimizer = build_adamw(model, settings.optimizer)
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}

    def whole(gradients: bool) -> dict[str, Tensor]:
        return tensors(model, gradients=gradients, tp=mesh.tp, shards=mesh.shards)

    def before_update(*_: Any) -> None:
        step = len(found["losses"])
        if step in COMPARED:
            found["gradients"][step] = whole(True)

    optimizer.register_step_pre_hook(before_update)
    share, micro = SEQUENCES // mesh.dp.size, settings.train.micro_batch_size
    for step, (ids, labels) in enumerate(batches(settings)):
        mine = range(mesh.dp.rank * share, (mesh.dp.rank + 1) * share)
        micro_batches = [
            MicroBatch(ids[i], labels[i], range(step * SEQUENCES + int(i[0]), step * SEQUENCES + int(i[-1]) + 1))
            for i in torch.tensor(mine).split(micro)
        ]
        batch = Batch(micro_batches, int((labels != -100).sum()), "")
        lr = 1e-2 * lr_multiplier(settings.schedule, step, STEPS, restart_every=EVERY)
        loss, norm = update(model, optimizer, batch, lr, 0.5, mesh, step + 1, zero=settings.parallel.zero)
        found["losses"].append(loss), found["norms"].append(norm)
        due = steps_since_restart(step + 1, EVERY) == 0
        assert due == (step + 1 == MERGED_AFTER)
        if due:
            restart(model, optimizer, SEED, step + 1, mesh.tp)
    frozen = [parameter for parameter, _ in described(model) if not parameter.requires_grad]
    assert frozen
    assert not any(parameter in optimizer.state for parameter in frozen)
    return {**found, "weights": whole(False)}


def errors_of(settings: TrainConfig, mesh: Mesh, expected: dict[str, Any], weights: dict[str, Tensor]) -> list[Any]:
    """Where a tolerance is exceeded, and by what."""
    model = build_model(settings, mesh)
    load(model, weights, mesh.tp)
    found = run_steps(model, settings, mesh)
    errors: list[tuple[str, float, float]] = []
    for name in ("losses", "norms"):
        values, references = (torch.tensor(result[name], dtype=torch.float64) for result in (found, expected))
        errors.append((name, distance(values, references), LATER))

    def held(references: dict[str, Tensor], values: dict[str, Tensor]) -> dict[str, Tensor]:
        assert values.keys() <= references.keys()
        return {name: references[name] for name in values}

    assert tuple(found["gradients"]) == COMPARED
    for step, values in found["gradients"].items():
        error, name = worst(values, held(expected["gradients"][step], values))
        errors.append((f"gradient of {name} in step {step}", error, TOLERANCE if step == 0 else LATER))
    error, name = worst(found["weights"], held(expected["weights"], found["weights"]))
    errors.append((f"weight {name}", error, LATER))
    return [(what, error) for what, error, allowed in errors if not error <= allowed]


def references(cases: list[Case]) -> bytes:
    """For each model among the cases its weights, and what plain torch makes of them.

    In bytes, because torch would send every tensor as a file handle.
    """
    models = {config(case).model.model_dump_json(): config(case) for case in cases}
    weights = {key: weights_of(settings) for key, settings in models.items()}
    return pickle.dumps({key: (weights[key], oracle(settings, weights[key])) for key, settings in models.items()})


def compare(mesh: Mesh, cases: list[Case], pickled: bytes) -> list[tuple[Case, list[Any]]]:
    """For each case what differs from plain torch."""
    out, known = [], pickle.loads(pickled)
    grids: dict[tuple[int, ...], Mesh] = {(1, 1, 1, 1): mesh}
    for case in cases:
        settings = config(case)
        weights, expected = known[settings.model.model_dump_json()]
        parallel = settings.parallel
        pp, dp, tp, shards = sizes = (parallel.pp, parallel.dp, parallel.tp, parallel.shards)
        if sizes not in grids:
            grids[sizes] = meshes.build(pp, dp, tp, torch.device("cpu"), 60, shards)
        out.append((case, errors_of(settings, grids[sizes], expected, weights)))
    return out


SINGLE: list[Case] = [
    dict(zip(AXES, ((1, 1, 1), 0, "1f1b", *values), strict=True))
    for values in [
        ("none", "none", 4, True, True, 0.0),
        ("none", "block", 1, False, False, 0.2),
        ("none", "none", 2, True, False, 0.2),
    ]
]


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_one_process_trains_as_plain_torch_does(case: Case) -> None:
    ((_, errors),) = compare(Mesh(), [case], references([case]))
    assert errors == []


@pytest.mark.timeout(3000)
def test_every_layout_trains_as_plain_torch_does() -> None:
    """Norms and losses of four steps with a merge after the third, gradients of the first and of the one after the
    merge, and the weights at the end."""
    chosen = product() if os.environ.get("BOOST_FULL_PARITY") else covering()
    assert len(chosen) >= 12
    for result in run_ranks(4, compare, chosen, references(chosen)):
        for case, errors in result:
            assert errors == [], (case, errors)


def bf16_errors(mesh: Mesh, seeds: range) -> list[tuple[float, float, float]]:
    """By seed, against fp64 in one process: the loss of these ranks in bf16, their gradients, and one process's."""
    sizes = {"rank": 5, "lora_alpha": 7.0, "ffn_size": 43, "vocab_size": 51, "heads": 8, "kv_heads": 2}
    model = model_section(linear="relora", lora_dropout=0.2, dropout=0.1, attention_bias=True, **sizes)
    out = []
    for seed in seeds:
        weights = perturbed(tensors(build(model, seed=seed)))
        found: list[tuple[Tensor, Tensor]] = []
        for at, dtype in ((Mesh(), torch.float64), (Mesh(), torch.bfloat16), (mesh, torch.bfloat16)):
            decoder = build(model, ParallelSection(tp=at.tp.size), at.tp, dtype, seed)
            load(decoder, weights)
            loss, gradients = loss_and_gradients(decoder, *tokens(model, seed=seed))
            found.append((loss, torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])))
        (exact, exact_gradients), (_, alone), (loss, mine) = found
        out.append((distance(loss, exact), distance(mine, exact_gradients), distance(alone, exact_gradients)))
    return out


def test_bf16_over_two_ranks_is_as_exact_as_in_one_process() -> None:
    """Where one process rounds a sum, two ranks round halves of it, whose squares add up to about that of the sum, and
    their sum: at most twice the variance. So over seeds the error of gradients is at most sqrt(2) of one process's.

    That in turn is below n u: n about 20 roundings per block and way, in two blocks, u = 2^-8. The loss is an average
    over tokens, within 2 u.
    """
    errors, others = run_ranks(2, bf16_errors, range(1, 7))
    assert errors == others
    losses, mine, alone = torch.tensor(errors).unbind(1)
    assert mine.norm() <= 2**0.5 * alone.norm()
    assert alone.max() < 80 * 2**-8
    assert losses.max() < 2 * 2**-8


def wire(mesh: Mesh, grouped: bool) -> dict[str, Any]:
    """Collectives of a block and of a step's sync, as the difference between models of three and of two layers."""
    seen: dict[str, dict[str, Any]] = {}
    for linear, layers in itertools.product(("relora", "dense"), (2, 3)):
        case = {**SINGLE[0], "layout": (1, 1, mesh.tp.size), "micro": SEQUENCES, "grouped": grouped, "odd": False}
        settings = config(case)
        changes: dict[str, Any] = {"linear": linear, "layers": layers, "ffn_size": 44, "vocab_size": 52}
        model_section = settings.model.model_copy(update=changes)
        model: Any = build_model(settings.model_copy(update={"model": model_section}), mesh)
        ids, labels = batches(settings)[0]
        with count_collectives() as forward:
            loss = model.loss(ids, labels)
        with count_collectives() as backward:
            loss.backward()
        with count_collectives() as sync:
            sum_gradients(partial_parameters(model), mesh.tp)
        for way, collectives in (("forward", forward), ("backward", backward), ("sync", sync)):
            counted = Counter((c.name, c.elements) for c in collectives)
            seen.setdefault(f"{linear} {way}", {})[str(layers)] = counted
    return seen


@pytest.mark.parametrize("grouped", [True, False])
def test_pairs_send_nothing_but_one_sum_per_step(grouped: bool) -> None:
    """Passes: what a dense block sends, 2 all-reduces of d each way. A step: one all-reduce of 7 r d per block."""
    d, rank, tokens = SMALL["hidden_size"], 5, SEQUENCES * LENGTH
    for seen in run_ranks(2, wire, grouped):
        for way in ("forward", "backward"):
            assert seen[f"relora {way}"] == seen[f"dense {way}"]
            assert seen[f"relora {way}"]["3"] - seen[f"relora {way}"]["2"] == Counter({("all_reduce", d * tokens): 2})
        assert not any(seen["dense sync"].values())
        for layers, collectives in seen["relora sync"].items():
            assert collectives == Counter([("all_reduce", int(layers) * 7 * rank * d)])


def restarted(mesh: Mesh) -> dict[str, Any]:
    """What a restart does to a model, and what it sends."""
    settings = config({**SINGLE[0], "layout": (1, 1, mesh.tp.size), "odd": True})
    model: Any = build_model(settings, mesh)
    weights = weights_of(settings)
    load(model, weights)
    optimizer = build_adamw(model, settings.optimizer)
    for state in optimizer.state.values():
        for value in state.values():
            value.fill_(3.0)
    (ids, labels), *_ = batches(settings)
    before = model.loss(ids, labels)
    with count_collectives() as sent:
        restart(model, optimizer, SEED, 4, mesh.tp)
    after = model.loss(ids, labels)
    states = {
        part.name: {kind: value.unique().tolist() for kind, value in optimizer.state[parameter].items()}
        for parameter, parts in described(model)
        if parameter.requires_grad
        for part in parts
    }
    return {
        "losses": (before, after),
        "sent": len(sent),
        "old": weights,
        "weights": tensors(model),
        "states": states,
        "begun": tensors(build_model(settings, mesh)),
    }


@pytest.mark.parametrize("tp", [1, 2])
def test_a_restart_keeps_the_function(tp: int) -> None:
    """And renews the factors and their part of the optimiser's state, and nothing else, without a collective."""
    first, *others = [restarted(Mesh())] if tp == 1 else run_ranks(tp, restarted)
    before, after = (loss.detach() for loss in first["losses"])
    assert distance(after, before) <= 1e-13
    assert first["sent"] == 0
    factors = 0
    for name, value in first["weights"].items():
        assert all(torch.equal(other["weights"][name], value) for other in others)
        state = first["states"].get(name)
        if name.endswith((".up.weight", ".down.weight")) and name.count(".") == 5:
            factors += 1
            assert state == {"step": [0.0], "exp_avg": [0.0], "exp_avg_sq": [0.0]}
            if name.endswith(".up.weight"):
                assert not value.any()
            else:
                bound = value.shape[1] ** -0.5
                assert 0.9 * bound < value.abs().max() <= bound
                assert not torch.equal(value, first["begun"][name])
        elif f"{name.removesuffix('.weight')}.down.weight" in first["weights"] and name.count(".") == 4:
            assert state is None, "frozen"
            assert not torch.equal(value, first["old"][name])
        else:
            assert state == {"step": [3.0], "exp_avg": [3.0], "exp_avg_sq": [3.0]}
            assert torch.equal(value, first["old"][name])
    assert factors == 2 * 7 * 2


def test_both_factors_are_not_zero_at_the_start() -> None:
    """B is, so W is what is computed; A is not, so B has a gradient from the first step on."""
    settings = config(SINGLE[1])
    begun = tensors(build_model(settings, Mesh()))
    for name, value in begun.items():
        if name.endswith(".up.weight") and name.count(".") == 5:
            assert not value.any()
            down = begun[name.replace(".up.weight", ".down.weight")]
            assert abs(float(down.std()) * (3 * down.shape[1]) ** 0.5 - 1) < 0.2, "uniform in 1 / sqrt(d_in)"
    dense = settings.model.model_copy(update={"linear": "dense", "rank": None})
    plain = tensors(build_model(settings.model_copy(update={"model": dense}), Mesh()))
    assert all(torch.equal(begun[name], plain[name]) for name in plain)
