"""The bridge of a low-rank pair: from partial products on all ranks to the complete latent on each.

One all-reduce of an r-wide tensor, and with Online RMSNorm the norm's statistic in the same all-reduce and the
division after it. Blocking and differentiable as a call; or started and finished separately, with the backward by
hand, so that computation of another half of the batch runs in between.

This one sums in the type of the activations. `boost.parallel.wire` has the bridge that sends another type,
`boost.parallel.sharded_bridge` the one that keeps latents sharded over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from boost.kernels.norm import divide_by_rms
from boost.parallel.collectives import (
    online_bridge,
    pack_online,
    start_all_reduce,
    sum_backward,
    sum_forward,
    unpack_online,
)
from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue

Activation = Callable[[Tensor], Tensor]


class Partial(NamedTuple):
    """What a chunk hands to the bridge after it.

    Attributes:
        product_TR: this rank's partial sum x_i A_i.
        norm_T: |x_i| of its shard where the bridge completes an RMSNorm too, else None.
    """

    product_TR: Tensor
    norm_T: Tensor | None = None


class Latent(NamedTuple):
    """What a pair's B reads.

    Attributes:
        h_TR: act(z) of all tokens.
        kept_TR: what is saved for the gradient of B.
        again: computes h from that.
    """

    h_TR: Tensor
    kept_TR: Tensor
    again: Activation


def local_latent(z_TR: Tensor, act: Activation) -> Latent:
    """Of a latent whose gradient needs no sum here."""
    return Latent(act(z_TR), z_TR, act)


class Pending(NamedTuple):
    """A bridge under way."""

    partial: Partial
    payload: Tensor
    work: dist.Work | None


class Crossed(NamedTuple):
    """A finished bridge: the latent, and for its backward what went in and came out of the all-reduce."""

    z_TR: Tensor
    partial: Partial
    totals: tuple[Tensor, ...]


class Bridge:
    """Calling it: all-reduce forward, identity backward. `spread`: identity forward, all-reduce backward.

    Args:
        tp: the ranks that hold partial products.
        hidden_size, eps: of the RMSNorm that an online bridge completes.
    """

    def __init__(self, tp: Group, hidden_size: int, eps: float) -> None:
        self.tp, self.hidden_size, self.eps = tp, hidden_size, eps

    def __call__(self, partial: Partial) -> Tensor:
        """The complete latent z [T, R], equal on all ranks."""
        total_TR, squares_T = self.sum(partial)
        return total_TR if squares_T is None else divide_by_rms(total_TR, squares_T, self.hidden_size, self.eps)

    def sum(self, partial: Partial) -> tuple[Tensor, Tensor | None]:
        """The sum of the products, and of the squares of the norms where there are any."""
        if partial.norm_T is None:
            return sum_forward(partial.product_TR, self.tp), None
        return online_bridge(partial.product_TR, partial.norm_T, self.tp)

    def spread(
        self, z_TR: Tensor, act: Activation, tokens: int, queue: WeightGradQueue | None, *, thrifty: bool
    ) -> Latent:
        """h = act(z) as B reads it. Each rank has another part of B, so the gradient of h is summed over them.

        Args:
            tokens: T.
            queue: weight gradients that can be computed behind that sum.
            thrifty: save no more than z for backward, even if h must then be gathered a second time.
        """
        return Latent(sum_backward(act(z_TR), self.tp, queue), z_TR, act)

    def start(self, partial: Partial) -> Pending:
        """Begins the all-reduce; `finish` waits for it."""
        product_TR, norm_T = partial
        payload = product_TR.detach().clone() if norm_T is None else pack_online(product_TR, norm_T, self.tp)
        return Pending(partial, payload, start_all_reduce(payload, self.tp))

    def finish(self, pending: Pending) -> Crossed:
        """The latent, as a leaf of whatever is computed from it."""
        partial, payload, work = pending
        if work is not None:
            work.wait()
        if partial.norm_T is None:
            return Crossed(payload.requires_grad_(), partial, ())
        total_TR, squares_T = unpack_online(payload, partial.product_TR, partial.norm_T, self.tp)
        totals = (total_TR.requires_grad_(), squares_T.requires_grad_())
        z_TR = divide_by_rms(*totals, self.hidden_size, self.eps)
        return Crossed(z_TR.detach().requires_grad_(), partial, (*totals, z_TR))

    def backward(self, crossed: Crossed, grad_TR: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(tensor of the partial, its gradient) pairs from the complete gradient of z."""
        product_TR, norm_T = crossed.partial
        if norm_T is None:
            return [(product_TR, grad_TR)]
        total_TR, squares_T, z_TR = crossed.totals
        z_TR.backward(grad_TR)
        assert total_TR.grad is not None
        assert squares_T.grad is not None
        return [(product_TR, total_TR.grad), (norm_T, 2 * norm_T.detach() * squares_T.grad)]
