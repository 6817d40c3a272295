"""Every differentiable collective, forward and backward, against the same computation in one process.

The single process holds all ranks' tensors in lists and writes each collective as the plain formula it stands for, so
autograd there knows nothing of ranks. The loss is a sum of one nonlinear term per rank, or, after `sum_forward` and
the online bridge, one term that every rank computes alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from boost.parallel import collectives
from boost.parallel.mesh import Group, Mesh
from tests.distributed.harness import run_ranks

TOLERANCE = 1e-12
WIDTH = 4

FORMULAS: dict[str, Callable[[Sequence[Tensor]], list[Tensor]]] = {
    "sum_forward": lambda xs: [sum(xs[1:], xs[0])] * len(xs),
    "sum_backward": lambda xs: list(xs),
    "sum_both": lambda xs: [sum(xs[1:], xs[0])] * len(xs),
    "gather_last": lambda xs: [torch.cat(list(xs), dim=-1)] * len(xs),
    "scatter_last": lambda xs: list(sum(xs[1:], xs[0]).chunk(len(xs), dim=-1)),
}
# How a rank's input is made from its leaf, and how it is used.
USES = ["plain", "strided", "one_dimension", "twice", "expanded_gradient", "strided_gradient"]


def leaf(rank: int, name: str, tp: int, use: str) -> Tensor:
    """A rank's leaf, from which `prepare` makes the input [..., n]; equal on all ranks before `sum_backward`."""
    generator = torch.Generator().manual_seed(0 if name == "sum_backward" else rank)
    width = WIDTH * tp if name == "scatter_last" else WIDTH
    shape = {"one_dimension": (width,), "strided": (2 * width, 5, 3)}.get(use, (3, 5, width))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def prepare(x: Tensor, use: str) -> Tensor:
    """Not contiguous where `use` says so: transposed, and every second column."""
    return x.permute(2, 1, 0)[..., ::2] if use == "strided" else x


def term(y: Tensor, rank: int, use: str) -> Tensor:
    """A nonlinear function of an output, another one on every rank."""
    if use == "expanded_gradient":
        return (rank + 1.5) * y.sum()
    if use == "strided_gradient":
        y = y.transpose(0, -1)
    weights = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape).cos() + rank
    return (weights * (y + 0.3 * y.square())).sum()


def whole_loss(name: str, xs: Sequence[Tensor], apply: Callable[[Sequence[Tensor]], list[Tensor]], use: str) -> Tensor:
    inputs = [prepare(x, use) for x in xs]
    outputs = apply(inputs)
    once = name == "sum_forward"  # its consumers are replicated: the same term everywhere, counted once
    losses = []
    again = apply([x.sin() for x in inputs]) if use == "twice" else outputs
    for rank, (y, y_again) in enumerate(zip(outputs, again, strict=True)):
        seed = 0 if once else rank
        loss = term(y, seed, use)
        if use == "twice":
            loss = loss + term(y_again * y, seed, use)
        losses.append(loss)
    return losses[0] if once else sum(losses[1:], losses[0])


def run_cases(mesh: Mesh) -> list[tuple[str, str, float, float, bool]]:
    """For each collective and use: error of the output, error of the gradient, and whether the input is unchanged."""
    tp = mesh.tp
    found = []
    for name, use in itertools.product(FORMULAS, USES):
        leaves = [leaf(rank, name, tp.size, use) for rank in range(tp.size)]
        if name == "sum_backward":
            leaves = [leaves[0]] * tp.size
        whole_loss(name, leaves, FORMULAS[name], use).backward()

        collective = getattr(collectives, name)
        mine = leaf(tp.rank, name, tp.size, use)
        x = prepare(mine, use)
        before = x.detach().clone()
        assert x.is_contiguous() is (use != "strided")
        y = collective(x, tp)
        seed = 0 if name == "sum_forward" else tp.rank
        loss = term(y, seed, use)
        if use == "twice":
            loss = loss + term(collective(x.sin(), tp) * y, seed, use)
        loss.backward()

        expected = FORMULAS[name]([prepare(leaf_, use).detach() for leaf_ in leaves])[tp.rank]
        assert mine.grad is not None
        assert leaves[tp.rank].grad is not None
        error = float((y.detach() - expected).abs().max()) if y.shape == expected.shape else float("inf")
        gradient_error = float((mine.grad - leaves[tp.rank].grad).abs().max())
        found.append((name, use, error, gradient_error, torch.equal(x.detach(), before)))
    return found


@pytest.mark.parametrize("tp", [2, 3])
def test_collectives_and_their_gradients_are_the_plain_formulas(tp: int) -> None:
    """For inputs and gradients that are not contiguous, are used twice, or have one or three dimensions."""
    for found in run_ranks(tp, run_cases):
        assert len(found) == len(FORMULAS) * len(USES)
        for name, use, error, gradient_error, unchanged in found:
            assert error <= TOLERANCE, (name, use, error)
            assert gradient_error <= TOLERANCE, (name, use, gradient_error)
            assert unchanged, (name, use)


def run_bridge(mesh: Mesh, dtype_name: str) -> dict[str, float]:
    tp, dtype = mesh.tp, getattr(torch, dtype_name)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(5)
    # Multiples of 1/8 up to 2: their sums are exact in every dtype, so that only the statistic is rounded.
    partials = (torch.randint(-16, 17, (tp.size, 5, 6), generator=generator) / 8).to(dtype)
    norms = torch.rand(tp.size, 6, 2, generator=generator, dtype=torch.float64).to(wide) * 3
    weights = torch.randn(5, generator=generator, dtype=torch.float64)

    def loss(total: Tensor, squares: Tensor) -> Tensor:
        return (total.double() * weights).sum() + (squares.double() + 1).log().sum()

    leaves = [x.detach().double().requires_grad_() for x in (partials, norms)]
    loss(leaves[0].sum(0).t(), leaves[1][..., 0].square().sum(0)).backward()

    mine, norm = partials[tp.rank].clone().requires_grad_(), norms[tp.rank].clone().requires_grad_()
    total, squares = collectives.online_bridge(mine.t(), norm[:, 0], tp)  # neither is contiguous
    assert total.dtype == dtype
    assert squares.dtype == wide
    loss(total, squares).backward()

    def error(value: Tensor | None, reference: Tensor) -> float:
        assert value is not None
        return float(((value.double() - reference).norm() / reference.norm()).item())

    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    return {
        "total": error(total.detach(), partials.double().sum(0).t()),
        "squares": error(squares.detach(), norms[..., 0].double().square().sum(0)),
        "grad_total": error(mine.grad, leaves[0].grad[tp.rank]),
        "grad_norm": error(norm.grad, leaves[1].grad[tp.rank]),
    }


@pytest.mark.parametrize(
    ("dtype", "limits"),
    [
        ("float64", (0, 1e-15, 1e-15, 1e-15)),
        ("float32", (0, 2e-7, 1e-7, 3e-7)),
        ("bfloat16", (0, 2**-16, 2**-8, 2**-15)),
    ],
)
@pytest.mark.parametrize("tp", [2, 3])
def test_online_bridge_sums_products_and_squares(tp: int, dtype: str, limits: tuple[float, ...]) -> None:
    """(P_i, |x_i|) to (sum P_i, sum |x_i|^2); the gradient of |x_i| is 2 |x_i| dS, with no collective."""
    for found in run_ranks(tp, run_bridge, dtype):
        for (what, error), limit in zip(found.items(), limits, strict=True):
            assert error <= limit, (what, error)


def run_plain(mesh: Mesh) -> list[Any]:
    """all_reduce and all_gather, which autograd does not see, and any_rank for every set of flags."""
    tp = mesh.tp
    x = (torch.arange(6.0).reshape(2, 3).t() + 10 * tp.rank).requires_grad_()
    total, stacked = collectives.all_reduce(x, tp), collectives.all_gather(x, tp)
    assert not total.requires_grad
    assert not stacked.requires_grad
    flags = [collectives.any_rank(flags[tp.rank], tp) for flags in itertools.product([False, True], repeat=tp.size)]
    collectives.barrier(tp)
    return [x.detach(), total, stacked, flags]


@pytest.mark.parametrize("tp", [2, 3])
def test_all_reduce_all_gather_and_any_rank(tp: int) -> None:
    """The sum, the stack in rank order, and an answer that is the same on all ranks and true when any flag is."""
    found = run_ranks(tp, run_plain)
    inputs = torch.stack([x for x, *_ in found])
    for x, total, stacked, flags in found:
        torch.testing.assert_close(total, inputs.sum(0), rtol=0, atol=0)
        torch.testing.assert_close(stacked, inputs, rtol=0, atol=0)
        assert flags == [any(flags) for flags in itertools.product([False, True], repeat=tp)]
        assert x.max() < 100  # the input is not the buffer of the sum


def test_a_group_of_one_rank_is_the_identity() -> None:
    """No copy and no trace in the graph."""
    x = torch.randn(2, 3, requires_grad=True)
    for name in FORMULAS:
        assert getattr(collectives, name)(x, Group()) is x
    total, squares = collectives.online_bridge(x, x[:, 0], Group())
    assert total is x
    torch.testing.assert_close(squares, x[:, 0].square())
    assert collectives.any_rank(True, Group())
    assert not collectives.any_rank(False, Group())
