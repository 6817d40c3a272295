"""Canonical names and fields in the spelling of Hugging Face's LLaMA, and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from boost.config import ModelSection
from boost.errors import UserError
from boost.model.decoder import outline
from boost.parallel.sharding import canonical_names

EXPORT_FORMAT = 1  # `FORMAT` of modeling_boost.py
LINEARS = {
    **{f"attention.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
NORMS = {"attention.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}
WHOLE = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
}
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# What may stand in a LLaMA's configuration and change its function: the only values that mean ours.
PLAIN: dict[str, tuple[Any, ...]] = {
    "rope_scaling": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "sliding_window": (None,),
}


def shapes(model: ModelSection) -> dict[str, tuple[int, ...]]:
    """Canonical name to unsharded shape of every parameter."""
    return canonical_names(outline(model))


def foreign_name(name: str, *, low_rank: bool) -> str:
    """A canonical name as transformers has it; the bias of a pair belongs to its second linear."""
    if name in WHOLE:
        return WHOLE[name]
    _, layer, part, linear, *rest = name.split(".")
    inner = f"{part}.{linear}"
    if inner in NORMS:
        return f"model.layers.{layer}.{NORMS[inner]}.weight"
    suffix = ".".join(["up", *rest] if low_rank and rest == ["bias"] else rest)
    return f"model.layers.{layer}.{LINEARS[inner]}.{suffix}"


def config_fields(model: ModelSection) -> dict[str, Any]:
    """The fields of a `LlamaConfig` that say what the model computes."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu" if model.gate_activation == "silu" else "linear",
        "rms_norm_eps": model.norm_eps,
        # Up to release 4 transformers reads the first, from 5 on the second.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
        "initializer_range": model.init_std,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def model_fields(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a dense `ModelSection` that a `LlamaConfig` stands for.

    Raises:
        UserError: a field is missing, or asks for what our model does not compute.
    """
    for field, allowed in PLAIN.items():
        if config.get(field) not in allowed:
            raise UserError(where, f"{field} is not supported", got=str(config[field])[:100])
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise UserError(where, "rope_parameters: only the default rotary embedding is supported", got=str(rope)[:100])
    acts = {"silu": "silu", "swish": "silu", "linear": "none"}
    act = _field(config, "hidden_act", where)
    if not isinstance(act, str) or act not in acts:
        raise UserError(where, "hidden_act is not supported", expected="silu or linear", got=str(act)[:100])
    heads, hidden = _size(config, "num_attention_heads", where), _size(config, "hidden_size", where)
    return {
        "linear": "dense",
        "hidden_size": hidden,
        "ffn_size": _size(config, "intermediate_size", where),
        "layers": _size(config, "num_hidden_layers", where),
        "heads": heads,
        "kv_heads": _size(config, "num_key_value_heads", where, heads),
        "head_size": _size(config, "head_dim", where, hidden // heads),
        "vocab_size": _size(config, "vocab_size", where),
        "gate_activation": acts[act],
        "norm_eps": _number(config, "rms_norm_eps", where),
        "rope_theta": _number({"rope_theta": 10000.0, **config, **rope}, "rope_theta", where),
        "tie_embeddings": _flag(config, "tie_word_embeddings", where),
        "attention_bias": _flag(config, "attention_bias", where),
        "mlp_bias": _flag(config, "mlp_bias", where),
        "init_std": _number({"initializer_range": 0.02, **config}, "initializer_range", where),
    }


def _field(config: Mapping[str, Any], name: str, where: str) -> Any:
    if config.get(name) is None:
        raise UserError(where, f"has no {name}")
    return config[name]


def _size(config: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = default if config.get(name) is None and default is not None else _field(config, name, where)
    if type(value) is not int or value < 1:
        raise UserError(where, name, expected="a whole number of at least 1", got=str(value)[:100])
    return value


def _number(config: Mapping[str, Any], name: str, where: str) -> float:
    value = _field(config, name, where)
    if type(value) not in (int, float) or not 0 < value < math.inf or value > sys.float_info.max:
        raise UserError(where, name, expected="a positive number", got=str(value)[:100])
    return float(value)


def _flag(config: Mapping[str, Any], name: str, where: str) -> bool:
    value = config.get(name) or False
    if not isinstance(value, bool):
        raise UserError(where, name, expected="true or false", got=str(value)[:100])
    return value
