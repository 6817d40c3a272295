"""Muon on the factors of low-rank linears, AdamW on everything else.

A factor moves by its momentum with the singular values brought near one, by five Newton-Schulz iterations (Jordan et
al., 2024). They multiply it with polynomials of its r x r Gram matrix, so one sum of r^2 numbers per factor is all
that ranks which share its rows communicate. `torch.optim.Muon` is the same on whole matrices, but for its bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from boost.config import OptimizerSection
from boost.parallel.collectives import all_reduce
from boost.parallel.mesh import Mesh
from boost.parallel.sharding import held_rows
from boost.training.optimizers.factors import Factor, factor_pairs, parameter_groups

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SHORTEST = 1e-7  # a momentum shorter than this is not scaled up to norm 1
# The root mean square of an AdamW step in units of its learning rate, which Muon's is scaled to (Liu et al., 2025), so
# that one learning rate serves both.
RMS_OF_ADAMW = 0.2
BUCKET_BYTES = 32 * 2**20


class Muon(torch.optim.Optimizer):
    """Its state is `step`, and `momentum_buffer` for factors or `exp_avg`, `exp_avg_sq` for other parameters.

    The momentum is betas[0], with Nesterov's correction.
    """

    def __init__(self, model: nn.Module, config: OptimizerSection, mesh: Mesh) -> None:
        self.mesh, self.betas, self.eps = mesh, config.betas, config.eps
        self.factors = [factor for pair in factor_pairs(model) for factor in (pair.down, pair.up)]
        super().__init__(parameter_groups(model, config, self.factors), {"lr": config.lr})
        self.count = torch.zeros((), dtype=torch.float32)
        for group in self.param_groups:
            kinds = ("momentum_buffer",) if group["factors"] else ("exp_avg", "exp_avg_sq")
            for parameter in group["params"]:
                moments = {kind: torch.zeros_like(parameter) for kind in kinds}
                self.state[parameter] = {"step": self.count, **moments}  # one count for all of them

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update from the complete gradients."""
        self.count += 1
        lr = self.param_groups[0]["lr"]
        for group in self.param_groups:
            for parameter in group["params"]:
                held_rows(parameter)[0].mul_(1 - lr * group["decay"])
                if group["factors"]:
                    gradient, momentum = self._held(parameter, "momentum_buffer")
                    momentum.lerp_(gradient, 1 - self.betas[0])
                else:
                    self._adam(parameter, lr)
        for factors in self._buckets():
            self._orthogonal(factors, lr)

    def _held(self, parameter: Tensor, *kinds: str) -> list[Tensor]:
        """What this process holds of the gradient and of some moments."""
        assert parameter.grad is not None
        return [held_rows(t)[0] for t in (parameter.grad, *(self.state[parameter][kind] for kind in kinds))]

    def _adam(self, parameter: Tensor, lr: float) -> None:
        count, (beta1, beta2) = int(self.count), self.betas
        gradient, first, second = self._held(parameter, "exp_avg", "exp_avg_sq")
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = second.sqrt().div_((1 - beta2**count) ** 0.5).add_(self.eps)
        held_rows(parameter)[0].addcdiv_(first, root, value=-lr / (1 - beta1**count))

    def _buckets(self) -> Iterator[Sequence[Factor]]:
        """Factors whose Grams are summed together."""
        if not self.factors:
            return
        first = self.factors[0]
        gram = first.part.shape[1 - first.wide] ** 2 * first.parameter.element_size()
        at_once = max(1, BUCKET_BYTES // gram)
        for start in range(0, len(self.factors), at_once):
            yield self.factors[start : start + at_once]

    def _orthogonal(self, factors: Sequence[Factor], lr: float) -> None:
        tp = self.mesh.tp
        updates = [self._update(factor) for factor in factors]
        grams = torch.stack([x_wr.t() @ x_wr for x_wr in updates])
        grams = all_reduce(all_reduce(grams, tp), self.mesh.shards)
        for factor, x_wr, gram in zip(factors, updates, grams, strict=True):
            scale = lr * RMS_OF_ADAMW * max(factor.part.shape) ** 0.5
            factor.rows(factor.parameter, tp).sub_(x_wr @ newton_schulz(gram), alpha=scale)

    def _update(self, factor: Factor) -> Tensor:
        """This rank's rows of the gradient, a step ahead on its momentum (Nesterov)."""
        parameter, tp = factor.parameter, self.mesh.tp
        assert parameter.grad is not None
        gradient, momentum = (
            factor.rows(tensor, tp) for tensor in (parameter.grad, self.state[parameter]["momentum_buffer"])
        )
        return gradient.lerp(momentum, self.betas[0])


def newton_schulz(gram: Tensor) -> Tensor:
    """What to multiply X with, on the right, for its iterations: [r, r] from X^T X [r, r].

    X is first scaled to norm 1, then again and again X (a + b G + c G^2) with its Gram G, which commutes with that.
    """
    a, b, c = NEWTON_SCHULZ
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    norm = gram.diagonal().sum().sqrt().clamp(min=SHORTEST)
    gram, product = gram / norm**2, identity / norm
    for _ in range(ITERATIONS):
        polynomial = a * identity + b * gram + c * gram @ gram
        product = product @ polynomial
        gram = polynomial @ gram @ polynomial
    return product
