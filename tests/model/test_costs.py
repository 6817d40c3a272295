"""The FLOPs formulas against torch's own counter on the operations that a model runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from boost.config import ModelSection, ParallelSection
from boost.model import costs
from tests.models import build, model_section, tensors, tokens

BATCH, SEQUENCE = 2, 12
TOKENS = BATCH * SEQUENCE

aten = torch.ops.aten
GEMMS = (aten.mm, aten.addmm, aten.addmm_, aten.bmm)

MODELS: dict[str, dict[str, Any]] = {
    "low-rank": {},
    "low-rank-gqa-tied": {"kv_heads": 2, "tie_embeddings": True, "rank": 5, "layers": 3},
    "identity-crossing": {"crossing": "identity"},
    "diagonal-crossing": {"crossing": "diagonal", "layers": 1},
    "dense-crossing": {"crossing": "dense", "rank": 5},
    "tensor-crossing": {"crossing": "tensor", "layers": 3},
    "sltrain": {"linear": "sltrain", "kv_heads": 2, "sparse_density": 0.07},
    "sltrain-blocks": {"linear": "sltrain", "sparse_support": "block_diagonal", "sparse_blocks": 4, "layers": 3},
    "dense": {"linear": "dense"},
    "relora": {"linear": "relora", "kv_heads": 2, "rank": 5, "layers": 3},
    "dense-gqa-tied": {"linear": "dense", "kv_heads": 1, "tie_embeddings": True, "layers": 3, "head_size": 10},
}


def attention_flops(model: ModelSection) -> float:
    """The formula's attention term alone, per token: what is left of it without layers' linears and head."""
    gemms = model.layers * costs.block_linear_flops_per_token(model) + 2 * model.vocab_size * model.hidden_size
    gemms += (model.layers - 1) * costs.gates_flops_per_token(model)
    return costs.forward_flops_per_token(model, SEQUENCE) - gemms


def addmm_flops(total: torch.Size, a: torch.Size, b: torch.Size, **_: Any) -> int:
    """For what the loss and ReLoRA's pairs add in place, which torch's counter does not know."""
    return 2 * a[0] * a[1] * b[1]


def counted(model: ModelSection, parallel: ParallelSection, *, train: bool) -> int:
    """FLOPs of all GEMMs of a forward to logits, or of a forward to the loss and its backward; no attention in it."""
    decoder = build(model, parallel)
    ids, labels = tokens(model, BATCH, SEQUENCE)
    # torch's counter has no formula for the CPU's fused attention, so what it counts are the linears and the head.
    counter = FlopCounterMode(display=False, custom_mapping={aten.addmm_: addmm_flops})
    with counter, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        if train:
            decoder.loss(ids, labels).backward()
        else:
            decoder(ids)
    seen = counter.get_flop_counts()["Global"]
    assert seen.keys() <= set(GEMMS), seen
    return sum(seen.values())


@pytest.mark.parametrize(("layout", "grouped"), [("btp", True), ("vanilla", False)])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_gemms_are_those_of_the_formula(changes: dict[str, Any], layout: Any, grouped: bool) -> None:
    """Forward to logits, and forward and backward of the loss (three times as many, but for frozen weights): equal to
    the last FLOP."""
    model = model_section(**changes)
    layout = "btp" if model.crossing != "none" or model.linear == "sltrain" else layout  # they have no other
    parallel = ParallelSection(group_linears=grouped, tensor_layout=layout)
    forward = TOKENS * (costs.forward_flops_per_token(model, SEQUENCE) - attention_flops(model))
    assert counted(model, parallel, train=False) == forward
    training = TOKENS * (costs.training_flops_per_token(model, SEQUENCE) - 3 * attention_flops(model))
    assert counted(model, parallel, train=True) == training


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_attention_is_the_causal_half_of_what_the_plain_form_runs(changes: dict[str, Any]) -> None:
    """q k^T and the product with v, as plain matrix products over the whole square, times (S + 1) / 2 S."""
    model = model_section(**changes)
    decoder = build(model)
    ids, _ = tokens(model, BATCH, SEQUENCE)
    counter = FlopCounterMode(display=False, custom_mapping={aten.addmm_: addmm_flops})
    with counter, sdpa_kernel(SDPBackend.MATH):
        decoder(ids)
    square = counter.get_total_flops() - counted(model, ParallelSection(), train=False)
    assert square * (SEQUENCE + 1) / (2 * SEQUENCE) == pytest.approx(TOKENS * attention_flops(model), rel=1e-12)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("biases", [True, False])
def test_parameters_are_counted(changes: dict[str, Any], biases: bool) -> None:
    """Every canonical tensor once: ties, GQA and biases included."""
    model = model_section(**changes, attention_bias=biases, mlp_bias=biases)
    assert costs.parameters(model) == sum(value.numel() for value in tensors(build(model)).values())
