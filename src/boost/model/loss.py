"""Vocabulary-parallel cross-entropy fused with the head, in chunks of tokens.

The [T, V] logits never exist whole, and no GEMM is repeated: a chunk's gradients are computed while its logits are
at hand, and backward only scales them by the incoming gradient. One all-gather of (log-sum-exp, target logit) per
token completes the softmax over the ranks' shards of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from boost.kernels.norm import statistic_dtype
from boost.parallel.collectives import all_gather
from boost.parallel.mesh import Group

IGNORED = -100
CHUNK_TOKENS = 256


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, weight_vD: Tensor, labels_T: Tensor, start: int, tp: Group, chunk: int, train: bool
    ) -> Tensor:
        weight = weight_vD.to(h_TD.dtype)
        wide = statistic_dtype(h_TD.dtype)
        total = torch.zeros((), dtype=wide, device=h_TD.device)
        grad_h = torch.empty_like(h_TD) if train else None
        grad_w = torch.zeros_like(weight_vD) if train else None
        for begin in range(0, h_TD.shape[0], chunk):
            h, labels = h_TD[begin : begin + chunk], labels_T[begin : begin + chunk]
            logits = (h @ weight.t()).to(wide)
            local = labels - start
            mine = (local >= 0) & (local < weight.shape[0])
            column = local.where(mine, 0).unsqueeze(-1)
            target = logits.gather(-1, column).squeeze(-1).where(mine, 0)
            shares = all_gather(torch.stack([logits.logsumexp(-1), target]), tp)
            lse, target = shares[:, 0].logsumexp(0), shares[:, 1].sum(0)
            kept = labels != IGNORED
            total += (lse - target).masked_fill(~kept, 0).sum()
            if grad_h is None or grad_w is None:
                continue
            # d loss / d logits = softmax - onehot, on the tokens that count.
            logits.sub_(lse.unsqueeze(-1)).exp_()
            logits.scatter_add_(-1, column, -mine.to(wide).unsqueeze(-1))
            grad = logits.masked_fill_(~kept.unsqueeze(-1), 0).to(h.dtype)
            torch.mm(grad, weight, out=grad_h[begin : begin + chunk])
            if grad_w.dtype == grad.dtype:
                grad_w.addmm_(grad.t(), h)
            else:
                grad_w += grad.t() @ h
        if train:
            ctx.save_for_backward(grad_h, grad_w)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        grad_h, grad_w = ctx.saved_tensors
        return (grad_h * scale).to(grad_h.dtype), grad_w * scale, None, None, None, None, None


def head_loss(
    h_TD: Tensor, weight_vD: Tensor, labels_T: Tensor, start: int, tp: Group, chunk: int = CHUNK_TOKENS
) -> Tensor:
    """The sum over tokens of -log softmax(h W^T)[label], a scalar in fp32 (fp64 where h is fp64).

    Args:
        h_TD: normalised hidden states, complete and equal on all ranks, [T, D].
        weight_vD: this rank's rows of the head, without padding, [v, D].
        labels_T: int64 [T]; IGNORED (-100) where a token does not count.
        start: the vocabulary index of the first local row.
        chunk: tokens whose logits exist at once.

    The gradient of h is this rank's partial sum over its shard of the vocabulary: the operation before completes it.
    """
    train = torch.is_grad_enabled() and (h_TD.requires_grad or weight_vD.requires_grad)
    return _HeadLoss.apply(h_TD, weight_vD, labels_T, start, tp, chunk, train)
