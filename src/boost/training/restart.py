"""ReLoRA's restarts: every pair is merged into its frozen matrix and begins again, with moments at zero.

A restart follows the update whose learning rate was 0, so the direction that it drops has lost no step. The moments
begin at an exact zero; the published code prunes 99.9 % of them at random instead, to dodge a bug of a ZeRO
implementation. Adam's count of steps begins again with them. The published code lets it run on: then the bias of
moments that have just begun is not corrected, and the nth update of a factor is too large by a factor of
(1 - beta1^n) / sqrt(1 - beta2^n), more than 6 around n = 12 with betas of 0.9 and 0.999.

Source: Lialin et al., arXiv 2307.05695, and its published code.
"""

from __future__ import annotations

import torch
from torch import nn

from boost.model.relora import ReloraLinears
from boost.parallel.mesh import Group
from boost.parallel.sharding import fill


def steps_since_restart(step: int, every: int) -> int:
    """How many of the `step` updates that a run has taken came after its last restart.

    Restarts follow updates every + 1, 2 every + 1, ...: of the updates counted from 0, those that are multiples.
    """
    return step if step <= every else (step - 1) % every


@torch.no_grad()
def restart(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, step: int, tp: Group) -> None:
    """Merges and redraws the factors of every linear; the function that the model computes stays the same.

    New factors are drawn from the run's seed, their name and the step, so all ranks draw the same. Every rank of the
    mesh calls it.

    Args:
        step: updates taken so far.
    """
    for module in model.modules():
        if isinstance(module, ReloraLinears):
            module.merge()
            for parameter, parts in module.factors():
                fill(parameter, parts, f"{seed}:{step}", tp)
                assert parameter in optimizer.state, "asking for it would make an empty state"
                for value in optimizer.state[parameter].values():
                    value.zero_()


def count_since_restart(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, every: int) -> None:
    """Sets the factors' own count of updates, after a checkpoint that holds the others' is loaded."""
    for module in model.modules():
        if isinstance(module, ReloraLinears):
            for parameter, _ in module.factors():
                assert parameter in optimizer.state
                optimizer.state[parameter]["step"].fill_(steps_since_restart(step, every))
