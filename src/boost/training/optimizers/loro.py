"""LORO: Adam on the factors, and every `exact_every` updates a step on the manifold of matrices of their rank.

Between exact steps ("approximate steps") every parameter follows Adam, the factors rank / hidden_size times as fast.
An exact step moves each product B A as `retraction` says; then all moments start again at zero, for the factors'
bases have turned. Mo et al., ICLR 2025; the arithmetic is that of the published LOROAdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from boost.config import ModelSection, OptimizerSection
from boost.errors import NumericsError
from boost.parallel.collectives import all_reduce, any_rank, broadcast
from boost.parallel.mesh import Mesh
from boost.parallel.sharding import held_rows
from boost.training.optimizers.factors import Factor, Pair, factor_pairs, parameter_groups
from boost.training.optimizers.retraction import SingularGramError, coefficients, grams

FAILURES = {"A": 1.0, "B": 2.0}  # how a rank tells the others which factor has lost rank


class LORO(torch.optim.Optimizer):
    """Its state per parameter is `exp_avg`, `exp_avg_sq` and `step`, the number of updates since the last exact step.

    Args:
        model: of low-rank linears without an activation between their factors.
        model_section: its sizes.
        mesh: over whose tp and dp ranks the factors' rows and the exact steps' work are divided.
    """

    def __init__(self, model: nn.Module, config: OptimizerSection, model_section: ModelSection, mesh: Mesh) -> None:
        assert config.exact_every is not None and model_section.rank is not None
        self.pairs, self.mesh, self.exact_every = factor_pairs(model), mesh, config.exact_every
        factors = (factor for pair in self.pairs for factor in (pair.down, pair.up))
        super().__init__(parameter_groups(model, config, factors), {"lr": config.lr})
        self.betas, self.eps = config.betas, config.eps
        # The published code scales every factor by the model's width, those of the MLP's width too.
        self.factor_scale = model_section.rank / model_section.hidden_size
        self.since_exact = torch.zeros((), dtype=torch.float32)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": self.since_exact,  # one count for all of them
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update from the complete gradients.

        Raises:
            NumericsError: on every rank, in an exact step whose factors have lost rank; the weights are then partly
                updated and must not be used.
        """
        self.since_exact += 1
        count = int(self.since_exact)
        exact = count >= self.exact_every
        (first, second), lr = self.betas, self.param_groups[0]["lr"]
        eta = lr * (1 - second**count) ** 0.5 / (1 - first**count)
        for group in self.param_groups:
            for parameter in group["params"]:
                self._moments(parameter)
                if not group["factors"]:
                    self._move(parameter, eta, lr * group["decay"])
                elif not exact:
                    # As published, the factors' decay follows eta, which Adam's bias correction is part of.
                    self._move(parameter, eta * self.factor_scale, eta * group["decay"])
        if exact:
            self._exact(eta)
            for state in self.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
            self.since_exact.zero_()

    def _moments(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = held_rows(parameter.grad)[0]
        first, second = (held_rows(self.state[parameter][kind])[0] for kind in ("exp_avg", "exp_avg_sq"))
        first.mul_(self.betas[0]).add_(gradient, alpha=1 - self.betas[0])
        second.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])

    def _move(self, parameter: Tensor, eta: float, decay: float) -> None:
        """Adam's step without bias correction, which eta carries, then decoupled decay."""
        state = self.state[parameter]
        weight, first, second = (held_rows(t)[0] for t in (parameter, state["exp_avg"], state["exp_avg_sq"]))
        weight.addcdiv_(first, second.sqrt().add_(self.eps), value=-eta).mul_(1 - decay)

    def _exact(self, eta: float) -> None:
        """All exact steps, in rounds that give each rank of tp and dp one linear whose r-sized work it does for all.

        So one linear's Grams at a time are communicated, and no two ranks can come to different decompositions.
        """
        tp, shards, replicas = self.mesh.tp, self.mesh.shards, self.mesh.replicas
        at_once = tp.size * shards.size * replicas.size
        lost: tuple[str, str] | None = None
        for start in range(0, len(self.pairs), at_once):
            pairs = self.pairs[start : start + at_once]
            results = list(self._decompositions(pairs, eta))
            for place, (pair, result) in enumerate(zip(pairs, results, strict=True)):
                in_tp, in_shards, in_replicas = _place(place, self.mesh)
                if (shards.rank, replicas.rank) == (in_shards, in_replicas):
                    broadcast(result, in_tp, tp)
                if replicas.rank == in_replicas:
                    broadcast(result, in_shards, shards)
                broadcast(result, in_replicas, replicas)
                lost = self._retract(pair, result) or lost
        # Stages hold other linears, and all of them must stop.
        if any_rank(lost is not None, self.mesh.pp):
            where, what = lost or ("another pipeline stage", "a factor")
            raise NumericsError(
                where,
                f"{what} has lost rank (its Gram matrix is singular), so LORO's exact step is undefined",
                hint="lower model.rank, optimizer.lr or optimizer.weight_decay; no checkpoint was written since",
            )

    def _decompositions(self, pairs: Sequence[Pair], eta: float) -> Iterator[Tensor]:
        """For each pair [1 + 4 r^2] numbers: a failure or 0, and the coefficients; only the pair's rank fills them."""
        mine: list[Tensor | None] = []
        for place, pair in enumerate(pairs):
            in_tp, in_shards, in_replicas = _place(place, self.mesh)
            total = None
            if self.mesh.replicas.rank == in_replicas:  # replicas hold the same
                total = all_reduce(all_reduce(grams(*self._rows(pair)), self.mesh.tp), self.mesh.shards)
            here = (self.mesh.tp.rank, self.mesh.shards.rank) == (in_tp, in_shards)
            mine.append(total if here else None)
        for pair, total in zip(pairs, mine, strict=True):
            result = torch.zeros(1 + 4 * pair.rank**2, dtype=torch.float64, device=pair.down.parameter.device)
            if total is not None:
                try:
                    result[1:] = coefficients(total, eta).view(-1)
                except SingularGramError as error:
                    result[0] = FAILURES[str(error)]
            yield result

    def _retract(self, pair: Pair, result: Tensor) -> tuple[str, str] | None:
        """Moves a pair's factors; or returns the linear and the factor of it that has lost rank."""
        failure = result[0].item()
        if failure:
            factor = next(name for name, number in FAILURES.items() if number == failure)
            return pair.name, f"factor {factor}"
        m, n, dm, dn = self._rows(pair)
        by_m, by_dm, by_n, by_dn = result[1:].view(4, pair.rank, pair.rank)
        pair.up.rows(pair.up.parameter, self.mesh.tp).copy_(m @ by_m + dm @ by_dm)
        pair.down.rows(pair.down.parameter, self.mesh.tp).copy_(n @ by_n + dn @ by_dn)
        return None

    def _rows(self, pair: Pair) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """This rank's rows of M = B and N = A^T, and of their directions, in fp64."""

        def held(factor: Factor) -> tuple[Tensor, Tensor]:
            state = self.state[factor.parameter]
            weight, first, second = (
                factor.rows(tensor, self.mesh.tp).double()
                for tensor in (factor.parameter, state["exp_avg"], state["exp_avg_sq"])
            )
            return weight, first / (second.sqrt() + self.eps)

        (m, dm), (n, dn) = held(pair.up), held(pair.down)
        return m, n, dm, dn


def _place(number: int, mesh: Mesh) -> tuple[int, int, int]:
    """Which rank of tp, of the shards and of the replicas does the r-sized work of a round's linear."""
    rest, in_tp = divmod(number, mesh.tp.size)
    in_replicas, in_shards = divmod(rest, mesh.shards.size)
    return in_tp, in_shards, in_replicas
