"""The single-process decoder equals `transformers`' LLaMA, code that no one here wrote.

Both run in float64 with SDPA (transformers' eager attention takes its softmax in fp32); its RMSNorm, which computes
in fp32, is replaced by the same formula in the input's dtype, and the loss is taken from its logits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from boost.config import ModelSection, ParallelSection
from tests.models import build, distance, load, loss_and_gradients, model_section, perturbed, tensors, tokens, worst

TOLERANCE = 1e-10

DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa-4-2": {"kv_heads": 2},
    "gqa-6-3-biases": {"hidden_size": 36, "heads": 6, "kv_heads": 3, "attention_bias": True, "mlp_bias": True},
    "mqa-tied": {"kv_heads": 1, "tie_embeddings": True},
    "narrow-heads": {"hidden_size": 36, "head_size": 4, "kv_heads": 2, "attention_bias": True},
    "wide-heads": {"head_size": 16, "tie_embeddings": True, "mlp_bias": True},
    "head-is-d-over-heads": {"head_size": 8},
    "eps-theta": {"norm_eps": 0.03, "rope_theta": 371.0},
}
LOW_RANK: dict[str, dict[str, Any]] = {
    f"{activation}-gate-{gate}": {"bottleneck_activation": activation, "gate_activation": gate}
    for activation in ("silu", "none")
    for gate in ("silu", "none")
}
LOW_RANK["gqa-tied-biases-eps-theta"] = {
    "kv_heads": 2,
    "head_size": 10,
    "tie_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "norm_eps": 0.03,
    "rope_theta": 371.0,
}


class Pair(nn.Module):
    """y = act(x A) B + bias, in place of one of transformers' linears."""

    def __init__(self, dense: nn.Linear, rank: int, activation: str) -> None:
        super().__init__()
        self.down = nn.Linear(dense.in_features, rank, bias=False)
        self.act: nn.Module = nn.SiLU() if activation == "silu" else nn.Identity()
        self.up = nn.Linear(rank, dense.out_features, bias=False)
        self.bias = nn.Parameter(torch.empty(dense.out_features)) if dense.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.act(self.down(x)))
        return y if self.bias is None else y + self.bias


def reference(model: ModelSection) -> LlamaForCausalLM:
    """transformers' model of the same architecture in float64, its linears replaced where ours are pairs."""
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_size,
        hidden_act="silu" if model.gate_activation == "silu" else "linear",
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=model.tie_embeddings,
        attention_bias=model.attention_bias,
        mlp_bias=model.mlp_bias,
        attn_implementation="sdpa",
    )
    llama = LlamaForCausalLM(config)
    if model.linear == "low_rank":
        assert model.rank is not None
        for layer in llama.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(parent, name, Pair(child, model.rank, model.bottleneck_activation))
    return llama.double()


def foreign_name(name: str) -> str:
    """A canonical name in transformers' spelling."""
    whole = {"embedding.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
    if name in whole:
        return whole[name]
    name = name.replace("attention.norm", "input_layernorm").replace("mlp.norm", "post_attention_layernorm")
    for linear in "qkvo":
        name = name.replace(f"attention.{linear}.", f"self_attn.{linear}_proj.")
    for linear in ("gate", "up", "down"):
        name = name.replace(f"mlp.{linear}.", f"mlp.{linear}_proj.")
    return "model." + name.replace("blocks.", "layers.")


@pytest.fixture(autouse=True)
def norm_in_input_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: LlamaRMSNorm, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def errors(model: ModelSection, parallel: ParallelSection) -> dict[str, float]:
    """How far our decoder is from transformers': logits, loss, and each gradient."""
    ours = build(model, parallel)
    weights = perturbed(tensors(ours))
    load(ours, weights)
    theirs = reference(model)
    held = dict(theirs.named_parameters())
    assert {foreign_name(name) for name in weights} == held.keys()
    with torch.no_grad():
        for name, value in weights.items():
            held[foreign_name(name)].copy_(value)

    ids, labels = tokens(model, batch=2, sequence=13)
    logits = theirs(ids).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    our_loss, gradients = loss_and_gradients(ours, ids, labels)
    expected = {name: held[foreign_name(name)].grad for name in weights}
    error, name = worst(gradients, expected)
    return {
        "logits": distance(ours(ids).detach(), logits.detach()),
        "loss": distance(our_loss, loss.detach()),
        name: error,
    }


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("changes", DENSE.values(), ids=DENSE)
def test_dense_decoder_is_llama(changes: dict[str, Any], grouped: bool) -> None:
    """Logits, loss and every gradient to 1e-10 for GQA, MQA, ties, biases, any head size, eps and theta."""
    found = errors(model_section(linear="dense", **changes), ParallelSection(group_linears=grouped))
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("layout", ["btp", "vanilla"])
@pytest.mark.parametrize("changes", LOW_RANK.values(), ids=LOW_RANK)
def test_low_rank_decoder_is_llama_with_pairs_in_place_of_linears(changes: dict[str, Any], layout: Any) -> None:
    """The same for A, act, B in place of q, k, v, o, gate, up and down, in either layout at tp = 1."""
    found = errors(model_section(**changes), ParallelSection(tensor_layout=layout))
    assert max(found.values()) <= TOLERANCE, found
