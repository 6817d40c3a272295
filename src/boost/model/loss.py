"""Vocabulary-parallel cross-entropy fused with the head, in chunks of tokens.

The [T, V] logits never exist whole, and no GEMM is repeated: a chunk's gradients are computed while its logits are
at hand, and backward only scales them by the incoming gradient. One all-gather of (log-sum-exp, target logit) per
token completes the softmax over the ranks' shards of the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from boost.kernels.norm import statistic_dtype
from boost.parallel.collectives import all_gather
from boost.parallel.mesh import Group

IGNORED = -100
# Of the logits that exist at once, in fp32.
LOGITS_BYTES = 64 * 2**20
# Rows of the head whose gradient is computed at once where it must be widened before it is added.
GRADIENT_ROWS = 2048


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, weight_vD: Tensor, labels_T: Tensor, start: int, tp: Group, chunk: int, train: bool
    ) -> Tensor:
        weight, vocabulary = weight_vD.to(h_TD.dtype), weight_vD.shape[0]
        wide = statistic_dtype(h_TD.dtype)
        total = torch.zeros((), dtype=wide, device=h_TD.device)
        grad_h = torch.empty_like(h_TD) if train else None
        # Summed over chunks in full precision, also where the weight is the bf16 copy that ZeRO gathered.
        grad_w = torch.zeros_like(weight_vD, dtype=wide) if train else None
        logits_cv = h_TD.new_empty(min(chunk, len(h_TD)), vocabulary, dtype=wide)
        narrow_cv = logits_cv if wide == h_TD.dtype else torch.empty_like(logits_cv, dtype=h_TD.dtype)
        for begin in range(0, h_TD.shape[0], chunk):
            h, labels = h_TD[begin : begin + chunk], labels_T[begin : begin + chunk]
            logits, narrow = logits_cv[: len(h)], narrow_cv[: len(h)]
            torch.mm(h, weight.t(), out=narrow)
            if narrow is not logits:
                logits.copy_(narrow)
            local = labels - start
            mine = (local >= 0) & (local < vocabulary)
            column = local.where(mine, 0).unsqueeze(-1)
            target = logits.gather(-1, column).squeeze(-1).where(mine, 0) if vocabulary else logits.new_zeros(len(h))
            # The exponentials stay in place of the logits: backward needs them again.
            top = logits.amax(-1) if vocabulary else logits.new_full((len(h),), -math.inf)
            sums = logits.sub_(top.unsqueeze(-1)).exp_().sum(-1)
            shares = all_gather(torch.stack([top + sums.log(), target]), tp)
            lse, target = shares[:, 0].logsumexp(0), shares[:, 1].sum(0)
            kept = labels != IGNORED
            total += (lse - target).masked_fill(~kept, 0).sum()
            if grad_h is None or grad_w is None:
                continue
            # d loss / d logits = softmax - onehot, on the tokens that count.
            logits.mul_((top - lse).exp().where(kept, 0).unsqueeze(-1))
            if vocabulary:
                logits.scatter_add_(-1, column, -(mine & kept).to(wide).unsqueeze(-1))
            if narrow is not logits:
                narrow.copy_(logits)
            torch.mm(narrow, weight, out=grad_h[begin : begin + chunk])
            _add_product(grad_w, narrow, h)
        if grad_w is not None:
            ctx.save_for_backward(grad_h, grad_w.to(weight_vD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        # In place: a second backward over the same graph then fails, as it must.
        grad_h, grad_w = ctx.saved_tensors
        return grad_h.mul_(scale), grad_w.mul_(scale), None, None, None, None, None


def _add_product(total_vD: Tensor, grad_Tv: Tensor, h_TD: Tensor) -> None:
    """total += grad^T h, which may be of a narrower type: then some rows at a time, so that they stay in the cache."""
    if total_vD.dtype == grad_Tv.dtype:
        total_vD.addmm_(grad_Tv.t(), h_TD)
        return
    narrow = h_TD.new_empty(min(GRADIENT_ROWS, len(total_vD)), h_TD.shape[1])
    wide = torch.empty_like(narrow, dtype=total_vD.dtype)
    for rows, columns in zip(total_vD.split(GRADIENT_ROWS), grad_Tv.split(GRADIENT_ROWS, dim=1), strict=True):
        product, widened = narrow[: len(rows)], wide[: len(rows)]
        torch.mm(columns.t(), h_TD, out=product)
        rows += widened.copy_(product)


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits over that many entries exist at once."""
    return max(1, LOGITS_BYTES // (4 * max(vocabulary, 1)))


def head_loss(h_TD: Tensor, weight_vD: Tensor, labels_T: Tensor, start: int, tp: Group, chunk: int) -> Tensor:
    """The sum over tokens of -log softmax(h W^T)[label], a scalar in fp32 (fp64 where h is fp64).

    Args:
        h_TD: normalised hidden states, complete and equal on all ranks, [T, D].
        weight_vD: this rank's rows of the head, without padding, [v, D].
        labels_T: int64 [T]; IGNORED (-100) where a token does not count.
        start: the vocabulary index of the first local row.
        chunk: tokens whose logits exist at once, the same on every rank (`chunk_tokens`).

    The gradient of h is this rank's partial sum over its shard of the vocabulary: the operation before completes it.
    """
    train = torch.is_grad_enabled() and (h_TD.requires_grad or weight_vD.requires_grad)
    return _HeadLoss.apply(h_TD, weight_vD, labels_T, start, tp, chunk, train)
