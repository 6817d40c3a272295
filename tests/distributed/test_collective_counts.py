"""What each layout sends: collectives and elements per token and block, counted on the wire.

d hidden, Q = heads * head_size, f d_ff, r rank. A block's share is the difference between a model of three and one of
two layers, so that the two ends cancel; what two blocks leave of the two-layer model is the ends. A reduce-scatter or
an all-gather of E elements counts E / 2, what it moves beside an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from boost.config import ModelSection, ParallelSection
from boost.parallel.collectives import Collective, count_collectives
from boost.parallel.mesh import Mesh
from tests.distributed.harness import run_ranks
from tests.models import build

TP = 2
BATCH, SEQUENCE = 2, 9
TOKENS = BATCH * SEQUENCE
# No two of the formulas below have equal values with these, and nothing is padded.
D, F, R, HEADS, VOCAB = 40, 68, 10, 4, 54
WIDE_HEADS = 14  # Q = 56

Counts = dict[str, Counter]


def section(layers: int, **changes: Any) -> ModelSection:
    fields: dict[str, Any] = {"rank": None if changes.get("linear") == "dense" else R, **changes}
    return ModelSection(hidden_size=D, ffn_size=F, layers=layers, heads=HEADS, vocab_size=VOCAB, **fields)


def counted(model: ModelSection, parallel: ParallelSection, mesh: Mesh, dtype: torch.dtype) -> Counts:
    """How often each collective (name, elements) is seen, forward and backward."""
    decoder = build(model, parallel, mesh.tp, dtype)
    ids = torch.arange(TOKENS).reshape(BATCH, SEQUENCE) % VOCAB
    with count_collectives() as forward:
        loss = decoder.loss(ids, ids)
    with count_collectives() as backward:
        loss.backward()
    width = dtype.itemsize
    assert all(c.bytes in (c.elements * width, c.elements * 4) for c in forward + backward)

    def kinds(seen: list[Collective]) -> Counter:
        return Counter((c.name, c.elements) for c in seen)

    return {"forward": kinds(forward), "backward": kinds(backward)}


def run_cases(mesh: Mesh, cases: dict[str, Any]) -> dict[str, tuple[Counts, Counts]]:
    """For each case one block's collectives, and those of the ends of the stack."""
    found = {}
    for name, (changes, options, dtype) in cases.items():
        parallel = ParallelSection(tp=TP, **options)
        two, three = (counted(section(n, **changes), parallel, mesh, getattr(torch, dtype)) for n in (2, 3))
        block, ends = {}, {}
        for way, seen in two.items():
            block[way] = three[way] - seen
            assert not seen - three[way]
            ends[way] = Counter(seen)
            ends[way].subtract({kind: 2 * n for kind, n in block[way].items()})
            assert min(ends[way].values()) >= 0
            ends[way] = +ends[way]
        found[name] = (block, ends)
    return found


LOW_RANK_LAYOUTS = ("vanilla", "vanilla_sharded_heads", "btp")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {}
for _layout in ("dense", *LOW_RANK_LAYOUTS):
    for _grouped in (True, False):
        _changes = {"linear": "dense"} if _layout == "dense" else {}
        _options = {"group_linears": _grouped, **({} if _layout == "dense" else {"tensor_layout": _layout})}
        _name = f"{_layout}-{'grouped' if _grouped else 'ungrouped'}"
        CASES[_name] = (_changes, _options, "float32")
        CASES[f"{_name}-wide"] = ({**_changes, "head_size": WIDE_HEADS}, _options, "float32")
        if _layout == "btp":
            CASES[f"{_name}-bf16"] = (_changes, _options, "bfloat16")
            CASES[f"{_name}-sync"] = (_changes, {**_options, "norm": "sync"}, "float32")
            CASES[f"{_name}-sync-bf16"] = (_changes, {**_options, "norm": "sync"}, "bfloat16")
            CASES[f"{_name}-gqa"] = ({"kv_heads": 2}, _options, "float32")
            CASES[f"{_name}-tied"] = ({"tie_embeddings": True}, _options, "float32")
    if _layout.startswith("vanilla"):
        CASES[f"{_layout}-a_grouped"] = ({}, {"tensor_layout": _layout, "group_b": False}, "float32")
for _grouped in (True, False):
    _name = f"dense_sequence_parallel-{'grouped' if _grouped else 'ungrouped'}"
    CASES[_name] = ({"linear": "dense"}, {"group_linears": _grouped, "sequence_parallel": True}, "float32")


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[Counts, Counts]]:
    """Every case, run once on two ranks, which agree."""
    first, second = run_ranks(TP, run_cases, CASES)
    assert first == second
    return first


def totals(seen: Counter) -> tuple[int, float]:
    """Collectives, and elements per token in the unit of an all-reduce."""
    elements = sum(Collective(name, n, 0).all_reduced_elements * times for (name, n), times in seen.items())
    return sum(seen.values()), elements / TOKENS


def expect(seen: Counter, collectives: int, elements: float) -> None:
    assert totals(seen) == (collectives, elements), dict(seen)


def test_formulas_are_told_apart() -> None:
    """With the sizes used here, different formulas have different values, so that none passes for another."""
    formulas = [7 * R, 2 * D, 5 * D + 2 * F, 3 * D + F, 6 * D + F, 4 * D + 2 * F, 4 * D + F, 7 * D + F]
    formulas += [7 * R + n for n in (2, 4 * TP, 5, 10 * TP)]
    assert len(set(formulas)) == len(formulas)


@pytest.mark.parametrize("variant", ["", "-gqa", "-tied", "-wide"])
def test_btp_grouped(found: dict[str, tuple[Counts, Counts]], variant: str) -> None:
    """4 all-reduces and 7 r forward and backward, whatever the heads; in fp32 one statistic more per norm."""
    block, _ = found[f"btp-grouped{variant}"]
    expect(block["forward"], 4, 7 * R + 2)
    expect(block["backward"], 4, 7 * R)
    sizes = (3 * R + 1, R, 2 * R + 1, R)
    assert block["forward"] == Counter(("all_reduce", size * TOKENS) for size in sizes)
    assert block["backward"] == Counter(("all_reduce", size * R * TOKENS) for size in (3, 1, 2, 1))


def test_btp_grouped_bf16(found: dict[str, tuple[Counts, Counts]]) -> None:
    """In bf16 each of the two norms adds 2 tp numbers to its bridge, and nothing in backward."""
    block, _ = found["btp-grouped-bf16"]
    expect(block["forward"], 4, 7 * R + 2 * 2 * TP)
    expect(block["backward"], 4, 7 * R)


@pytest.mark.parametrize("variant", ["", "-gqa", "-tied", "-wide"])
def test_btp_ungrouped(found: dict[str, tuple[Counts, Counts]], variant: str) -> None:
    """7 all-reduces of r each way; each of the five after a norm carries the statistic."""
    block, _ = found[f"btp-ungrouped{variant}"]
    expect(block["forward"], 7, 7 * R + 5)
    expect(block["backward"], 7, 7 * R)


def test_btp_ungrouped_bf16(found: dict[str, tuple[Counts, Counts]]) -> None:
    """As above, with 2 tp numbers for the statistic."""
    block, _ = found["btp-ungrouped-bf16"]
    expect(block["forward"], 7, 7 * R + 5 * 2 * TP)
    expect(block["backward"], 7, 7 * R)


@pytest.mark.parametrize("dtype", ["", "-bf16"])
@pytest.mark.parametrize(("grouping", "bridges"), [("grouped", 4), ("ungrouped", 7)])
def test_btp_sync_norm(found: dict[str, tuple[Counts, Counts]], grouping: str, bridges: int, dtype: str) -> None:
    """Each of the two norms has an all-reduce of one number per token of its own, forward and backward."""
    block, _ = found[f"btp-{grouping}-sync{dtype}"]
    for way in ("forward", "backward"):
        expect(block[way], bridges + 2, 7 * R + 2)
        assert block[way]["all_reduce", TOKENS] == 2


@pytest.mark.parametrize(("variant", "q"), [("", D), ("-wide", HEADS * WIDE_HEADS)])
def test_vanilla(found: dict[str, tuple[Counts, Counts]], variant: str, q: int) -> None:
    """Grouped 5 d + 2 f forward and 3 d + f backward in 4 calls each; ungrouped 7 calls, 6 d + f backward.

    A alone grouped, each B with its own all-reduce: 7 calls forward and 4 backward with the grouped elements.

    With Q other than d: q, k, v end in 3 Q, o in d, gate and up in 2 f, down in d; backward begins, for grouped
    linears, in d before q, k, v, Q before o, d before gate and up, f before down.
    """
    block, _ = found[f"vanilla-grouped{variant}"]
    expect(block["forward"], 4, 3 * q + 2 * D + 2 * F)
    expect(block["backward"], 4, 2 * D + q + F)
    block, _ = found[f"vanilla-ungrouped{variant}"]
    expect(block["forward"], 7, 3 * q + 2 * D + 2 * F)
    expect(block["backward"], 7, 5 * D + q + F)
    block, _ = found["vanilla-a_grouped"]
    expect(block["forward"], 7, 5 * D + 2 * F)
    expect(block["backward"], 4, 3 * D + F)
    if q == D:
        assert (3 * q + 2 * D + 2 * F, 2 * D + q + F, 5 * D + q + F) == (5 * D + 2 * F, 3 * D + F, 6 * D + F)


@pytest.mark.parametrize(("variant", "q"), [("", D), ("-wide", HEADS * WIDE_HEADS)])
def test_vanilla_with_sharded_heads(found: dict[str, tuple[Counts, Counts]], variant: str, q: int) -> None:
    """Grouped 4 d + 2 f forward (3 Q / 2 + Q / 2 + 2 d + 2 f) and 4 d + f backward (2 Q + 2 d + f), 5 calls each.

    Forward: the reduce-scatter of q, k, v (3 Q, half counted), the all-gather before o (Q, half counted), the
    all-reduces after o (d), gate and up (2 f), down (d). Backward: f before down, d before gate and up, nothing
    before o, whose input's gradient the gather's reduce-scatter completes (Q, half counted), the scatter's all-gather
    (3 Q, half counted), d before q, k, v. Ungrouped, q, k, v and gate, up repeat theirs: 8 calls forward, and 10 with
    2 Q + 5 d + f backward.
    """
    block, _ = found[f"vanilla_sharded_heads-grouped{variant}"]
    expect(block["forward"], 5, 2 * q + 2 * D + 2 * F)
    expect(block["backward"], 5, 2 * q + 2 * D + F)
    assert block["forward"]["reduce_scatter", 3 * q * TOKENS] == block["forward"]["all_gather", q * TOKENS] == 1
    assert block["backward"]["all_gather", 3 * q * TOKENS] == block["backward"]["reduce_scatter", q * TOKENS] == 1
    block, _ = found[f"vanilla_sharded_heads-ungrouped{variant}"]
    expect(block["forward"], 8, 2 * q + 2 * D + 2 * F)
    expect(block["backward"], 10, 2 * q + 5 * D + F)


@pytest.mark.parametrize("variant", ["", "-wide"])
@pytest.mark.parametrize("grouping", ["grouped", "ungrouped"])
def test_dense(found: dict[str, tuple[Counts, Counts]], grouping: str, variant: str) -> None:
    """Megatron: 2 all-reduces of d each way, whatever the grouping."""
    block, _ = found[f"dense-{grouping}{variant}"]
    for way in ("forward", "backward"):
        assert block[way] == Counter({("all_reduce", D * TOKENS): 2})


@pytest.mark.parametrize("grouping", ["grouped", "ungrouped"])
def test_dense_with_sequence_parallelism(found: dict[str, tuple[Counts, Counts]], grouping: str) -> None:
    """Each all-reduce is an all-gather and a reduce-scatter, 2 d each way; backward also gathers the inputs of the
    column-parallel linears again, d in all, and sums the gradients of two gains, which have no tokens."""
    block, ends = found[f"dense_sequence_parallel-{grouping}"]
    expect(block["forward"], 4, 2 * D)
    assert block["forward"] == Counter({("all_gather", D * TOKENS): 2, ("reduce_scatter", D * TOKENS): 2})
    expect(block["backward"], 8, 3 * D + 2 * D / TOKENS)
    assert block["backward"] == Counter(
        {("all_gather", D * TOKENS): 4, ("reduce_scatter", D * TOKENS): 2, ("all_reduce", D): 2}
    )
    loss = ("all_gather", 2 * TP * TOKENS)
    assert ends["forward"] == Counter([("reduce_scatter", D * TOKENS), ("all_gather", D * TOKENS), loss])
    assert ends["backward"] == Counter([("all_gather", D * TOKENS), ("reduce_scatter", D * TOKENS), ("all_reduce", D)])


@pytest.mark.parametrize("variant", ["grouped", "ungrouped", "grouped-bf16", "grouped-sync"])
def test_ends_of_the_stack_under_btp(found: dict[str, tuple[Counts, Counts]], variant: str) -> None:
    """No collective in the embedding; one all-gather of d per token before the head and two numbers per token and
    rank in the loss; backward one reduce-scatter of d per token, and d numbers in all for the final gain."""
    _, ends = found[f"btp-{variant}"]
    loss = ("all_gather", 2 * TP * TOKENS)
    assert ends["forward"] == Counter([("all_gather", D * TOKENS), loss])
    assert ends["backward"] == Counter([("reduce_scatter", D * TOKENS), ("all_reduce", D)])


@pytest.mark.parametrize("grouping", ["grouped", "ungrouped"])
def test_a_tied_embedding_under_btp_adds_a_scatter(found: dict[str, tuple[Counts, Counts]], grouping: str) -> None:
    """The table is split by vocabulary: a reduce-scatter of d per token in forward, its all-gather in backward."""
    _, ends = found[f"btp-{grouping}-tied"]
    untied = found[f"btp-{grouping}"][1]
    assert ends["forward"] - untied["forward"] == Counter([("reduce_scatter", D * TOKENS)])
    assert ends["backward"] - untied["backward"] == Counter([("all_gather", D * TOKENS)])


@pytest.mark.parametrize("layout", ["dense", "vanilla", "vanilla_sharded_heads"])
def test_ends_of_the_stack_where_hidden_is_whole(found: dict[str, tuple[Counts, Counts]], layout: str) -> None:
    """An all-reduce of d per token after the embedding, one before the head in backward, and the loss."""
    _, ends = found[f"{layout}-grouped"]
    assert ends["forward"] == Counter([("all_reduce", D * TOKENS), ("all_gather", 2 * TP * TOKENS)])
    assert ends["backward"] == Counter([("all_reduce", D * TOKENS)])
