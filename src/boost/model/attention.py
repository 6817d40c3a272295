"""Causal attention over the heads that this rank holds."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from boost.model.context import Context
from boost.model.rope import rotate


def attention(q_TQ: Tensor, k_TQ: Tensor, v_TQ: Tensor, head_size: int, layer: int, context: Context) -> Tensor:
    """Rotary causal attention, with fewer key/value heads than query heads where the widths say so (GQA).

    Args:
        q_TQ: queries of the local heads, [T, heads * head_size].
        k_TQ, v_TQ: keys and values, [T, kv_heads * head_size]; local kv heads divide local heads.

    Returns:
        [T, heads * head_size].
    """
    q, k, v = (x.view(context.batch, context.sequence, -1, head_size).transpose(1, 2) for x in (q_TQ, k_TQ, v_TQ))
    q, k = rotate(q, context.cos_SK, context.sin_SK), rotate(k, context.cos_SK, context.sin_SK)
    earlier = 0
    if context.cache is not None:
        k, v = context.cache.extend(layer, k, v)
        earlier = k.shape[-2] - context.sequence
    # With a cache, tokens are fed one at a time after the prompt: a single query sees every key.
    if earlier and context.sequence > 1:
        raise ValueError(f"a cache of {earlier} tokens can be extended by one token at a time, not {context.sequence}")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=context.sequence > 1, enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2).reshape(context.batch * context.sequence, -1)
