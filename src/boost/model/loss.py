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
# Of the logits that exist at once, counted in fp32.
LOGITS_BYTES = 128 * 2**20
# Of those whose softmax a CPU takes at once: several passes over as much as its caches hold.
SOFTMAX_BYTES = 2**20
# The least share of a token's probability that counts: what is divided by it must not overflow.
SMALLEST_SHARE = math.exp(-60)
# Rows of the head whose gradient is computed at once where it must be widened before it is added.
GRADIENT_ROWS = 2048


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, weight_vD: Tensor, labels_T: Tensor, start: int, tp: Group, chunk: int, train: bool
    ) -> Tensor:
        assert len(h_TD), "no tokens"
        weight, vocabulary = weight_vD.to(h_TD.dtype), weight_vD.shape[0]
        wide = statistic_dtype(h_TD.dtype)
        total = torch.zeros((), dtype=wide, device=h_TD.device)
        grad_h = torch.empty_like(h_TD) if train else None
        # Summed over chunks in full precision, also where the weight is the bf16 copy that ZeRO gathered.
        grad_w = torch.empty_like(weight_vD, dtype=wide) if train else None
        logits_cv = h_TD.new_empty(min(chunk, len(h_TD)), vocabulary)
        for begin in range(0, h_TD.shape[0], chunk):
            h, labels = h_TD[begin : begin + chunk], labels_T[begin : begin + chunk]
            logits = logits_cv[: len(h)]
            torch.mm(h, weight.t(), out=logits)
            local = labels - start
            mine = (local >= 0) & (local < vocabulary)
            column = local.where(mine, 0)
            local_lse, target, probability = _softmax_in_place(logits, column, wide)
            shares = all_gather(torch.stack([local_lse, target.where(mine, 0)]), tp)
            lse, target = shares[:, 0].logsumexp(0), shares[:, 1].sum(0)
            kept = labels != IGNORED
            total += (lse - target).masked_fill(~kept, 0).sum()
            if grad_h is None or grad_w is None:
                continue
            # d loss / d logits = softmax - onehot on the tokens that count; softmax is this rank's, times its share.
            share = (local_lse - lse).exp().clamp_min(SMALLEST_SHARE)
            if vocabulary:
                onehot = share.reciprocal().where(mine, 0)
                rows = torch.arange(0, logits.numel(), vocabulary, device=h.device)
                # (scatter_ would copy bf16 logits as a whole on CPUs.)
                logits.view(-1).index_copy_(0, rows + column, (probability - onehot).to(h.dtype))
            counts = share.where(kept, 0).unsqueeze(-1)
            torch.mm(logits, weight, out=grad_h[begin : begin + chunk]).mul_(counts)
            _add_product(grad_w, logits, (h * counts).to(h.dtype), first=begin == 0)
        if grad_w is not None:
            ctx.save_for_backward(grad_h, grad_w.to(weight_vD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        # In place: a second backward over the same graph then fails, as it must.
        grad_h, grad_w = ctx.saved_tensors
        return grad_h.mul_(scale), grad_w.mul_(scale), None, None, None, None, None


def _softmax_in_place(logits_cv: Tensor, column_c: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Puts each row's softmax in place of its logits; computes in `wide`.

    Returns:
        per row, in `wide` [c]: log-sum-exp, and of the entry in its column the logit and the probability.
    """
    rows, vocabulary = logits_cv.shape
    lse_c, target_c, probability_c = logits_cv.new_zeros(3, rows, dtype=wide).unbind()
    if not vocabulary:
        return lse_c.fill_(-math.inf), target_c, probability_c
    size = max(1, SOFTMAX_BYTES // (vocabulary * wide.itemsize)) if logits_cv.device.type == "cpu" else rows
    for begin in range(0, rows, size):
        some = slice(begin, begin + size)
        logits, column = logits_cv[some], column_c[some].unsqueeze(-1)
        values = logits.to(wide)
        target_c[some] = values.gather(-1, column).squeeze(-1)
        top = values.amax(-1, keepdim=True)
        sums = values.sub_(top).exp_().sum(-1, keepdim=True)
        log_sums = sums.log()
        # Divided by way of the logarithm, which rounds as the gradient of a log-softmax does: LORO's published
        # trajectory, which magnifies rounding, is met to its limits that way.
        values.mul_((-log_sums).exp())
        lse_c[some] = (top + log_sums).squeeze(-1)
        probability_c[some] = values.gather(-1, column).squeeze(-1)
        if values is not logits:
            logits.copy_(values)
    return lse_c, target_c, probability_c


def _add_product(total_vD: Tensor, grad_Tv: Tensor, h_TD: Tensor, *, first: bool) -> None:
    """total += grad^T h, or = for the first; they may be of a narrower type: then some rows at a time, so that they
    stay in the cache."""
    if total_vD.dtype == grad_Tv.dtype:
        total_vD.addmm_(grad_Tv.t(), h_TD, beta=0 if first else 1)
        return
    narrow = h_TD.new_empty(min(GRADIENT_ROWS, len(total_vD)), h_TD.shape[1])
    wide = torch.empty_like(narrow, dtype=total_vD.dtype)
    for rows, columns in zip(total_vD.split(GRADIENT_ROWS), grad_Tv.split(GRADIENT_ROWS, dim=1), strict=True):
        product, widened = narrow[: len(rows)], wide[: len(rows)]
        torch.mm(columns.t(), h_TD, out=product)
        if first:
            rows.copy_(product)
        else:
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
