"""LLaMA in plain torch, with no code of ours but the rotary tables: what decoders are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config import ModelSection
from boost.model.rope import rope_tables


def plain_loss(
    model: ModelSection,
    p: Mapping[str, Tensor],
    ids: Tensor,
    labels: Tensor,
    linear: Callable[[Tensor, int, str], Tensor],
    drop: Callable[[Tensor, int, str], Tensor] = lambda x, layer, site: x,
) -> Tensor:
    """Mean loss over the labels that count, in fp64.

    Args:
        p: canonical tensors outside of the linears.
        linear: of an input, a layer and a name such as `attention.q`.
        drop: of a branch's output, a layer and `attention` or `mlp`.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (model.hidden_size,), p[f"{name}.weight"], model.norm_eps)

    def heads(x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, model.head_size)).transpose(1, 2)

    cos, sin = rope_tables(ids.shape[1], model.head_size, model.rope_theta, torch.float64, ids.device)

    def rotate(x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-two, one], dim=-1) * sin

    x = p["embedding.weight"][ids]
    for layer in range(model.layers):
        y = norm(x, f"blocks.{layer}.attention.norm")
        q = rotate(heads(linear(y, layer, "attention.q"), model.heads))
        k = rotate(heads(linear(y, layer, "attention.k"), model.kv_heads))
        v = heads(linear(y, layer, "attention.v"), model.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + drop(linear(y.transpose(1, 2).flatten(-2), layer, "attention.o"), layer, "attention")
        y = norm(x, f"blocks.{layer}.mlp.norm")
        up = linear(y, layer, "mlp.up")
        x = x + drop(linear(F.silu(linear(y, layer, "mlp.gate")) * up, layer, "mlp.down"), layer, "mlp")
    logits = F.linear(norm(x, "norm"), p["embedding.weight" if model.tie_embeddings else "head.weight"])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
