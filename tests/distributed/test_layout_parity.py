"""Every layout at tp 1, 2, 4 equals the single process: loss and every gradient, in float64."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import pytest
import torch

from boost.config import ParallelSection
from boost.parallel.mesh import Mesh
from tests.distributed.harness import run_ranks
from tests.models import build, distance, load, loss_and_gradients, model_section, perturbed, tensors, tokens, worst

TOLERANCE = 1e-10
LAYOUTS = ["dense", "dense_sequence_parallel", "vanilla", "vanilla_sharded_heads", "btp"]
AXES: dict[str, list[Any]] = {
    "layout": LAYOUTS,
    "activation": ["silu", "none"],
    "kv_heads": [4, "gqa"],
    "tie_embeddings": [True, False],
    "group_linears": [True, False],
    "group_b": [True, False],
    "norm": ["online", "sync"],
    "extreme": ["plain", "outlier", "zero_shard", "tiny"],
}
# Fields of `parallel` that only change how a layout computes what it computes, for tests of layouts over other ranks.
EXTRAS: dict[str, dict[str, Any]] = {
    "none": {},
    "ungrouped": {"group_linears": False},
    "sync": {"norm": "sync"},
    "sharded_bottleneck": {"sequence_sharded_bottleneck": True},
    "fp32_wire": {"bridge_dtype": "fp32"},
}


def product() -> list[dict[str, Any]]:
    """The full product of the options, without repetitions of options that a layout does not have."""
    cases = []
    for values in itertools.product(*AXES.values()):
        case = dict(zip(AXES, values, strict=True))
        if case["layout"] != "btp" and case["norm"] == "sync":
            continue
        if not case["group_b"] and not (case["group_linears"] and case["layout"].startswith("vanilla")):
            continue
        if case["layout"].startswith("dense") and case["activation"] == "none":
            continue
        cases.append(case)
    return cases


def pairwise(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A small subset in which every pair of option values that meets in `cases` meets too (greedy)."""

    def pairs(case: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(sorted(case.items(), key=str), 2))

    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def cases() -> list[dict[str, Any]]:
    return product() if os.environ.get("BOOST_FULL_PARITY") else pairwise(product())


def prepared(case: dict[str, Any], tp: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model section, and weights under which its options, and mistakes in them, show."""
    dense = case["layout"].startswith("dense")
    model = model_section(
        linear="dense" if dense else "low_rank",
        # GQA with as few kv heads as the layout allows, so that q and k, v have unequal widths.
        kv_heads=4 if case["kv_heads"] == 4 else max(2, tp if case["layout"] != "vanilla" else 1),
        heads=8 if case["kv_heads"] == "gqa" else 4,
        tie_embeddings=case["tie_embeddings"],
        bottleneck_activation=case["activation"],
        gate_activation="none" if case["activation"] == "silu" else "silu",
        ffn_size=43,  # padded at tp 2 and 4
        vocab_size=51,  # padded at tp 2 and 4
        attention_bias=case["tie_embeddings"],
        mlp_bias=not case["tie_embeddings"],
    )
    weights = perturbed(tensors(build(model)))
    if case["extreme"] == "outlier":
        weights["embedding.weight"][:, -2] *= 1e4
    elif case["extreme"] == "zero_shard":
        # The last quarter of hidden is zero throughout the residual stream: whole shards at tp 2 or 4.
        weights["embedding.weight"][:, model.hidden_size // 2 :] = 0
        for name, value in weights.items():
            last = name.endswith(("o.up.weight", "down.up.weight", "o.bias", "down.bias", "o.weight", "down.weight"))
            if last and value.shape[0] == model.hidden_size:
                value[model.hidden_size // 2 :] = 0
    elif case["extreme"] == "tiny":
        # Biases shrink too: beside inputs of 1e-6 they would make all tokens equal to six digits, and the gradients
        # of q and k, which come from differences between tokens, would lose those digits in any arithmetic.
        for name, value in weights.items():
            if name == "embedding.weight" or name.endswith(".bias"):
                value *= 1e-6
    return model, weights


def compare(mesh: Mesh, all_cases: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float, float, str]]:
    """For each case the error of the loss and the worst error of a gradient of this layout against tp = 1."""
    out = []
    for case in all_cases:
        model, weights = prepared(case, mesh.tp.size)
        ids, labels = tokens(model)
        # The reference is the plainest form: one process, ungrouped, BTP (or dense).
        single = build(model, ParallelSection(group_linears=False))
        load(single, weights)
        loss, gradients = loss_and_gradients(single, ids, labels)
        parallel = ParallelSection(
            tp=mesh.tp.size,
            tensor_layout="btp" if case["layout"].startswith("dense") else case["layout"],
            group_linears=case["group_linears"],
            group_b=case["group_b"],
            norm=case["norm"],
            sequence_parallel=case["layout"] == "dense_sequence_parallel",
        )
        sharded = build(model, parallel, mesh.tp)
        load(sharded, weights)
        sharded_loss, sharded_gradients = loss_and_gradients(sharded, ids, labels)
        error, name = worst(sharded_gradients, gradients)
        out.append((case, distance(sharded_loss, loss), error, name))
    return out


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layout_equals_single_process(tp: int) -> None:
    chosen = cases()
    assert len(chosen) >= 15
    results = [compare(Mesh(), chosen)] if tp == 1 else run_ranks(tp, compare, chosen)
    for result in results:
        for case, loss_error, gradient_error, name in result:
            assert loss_error <= TOLERANCE, (case, loss_error)
            assert gradient_error <= TOLERANCE, (case, gradient_error, name)


def test_what_is_no_number_is_infinitely_far() -> None:
    """Wherever it stands: `max` passes by a NaN that is not the first."""
    right = {name: torch.ones(2) for name in "abc"}
    assert worst(right, right)[0] == 0
    for broken in (math.nan, math.inf):
        for name in right:
            wrong = {**right, name: torch.tensor([1.0, broken])}
            assert worst(wrong, right) == worst(right, wrong) == (math.inf, name)
