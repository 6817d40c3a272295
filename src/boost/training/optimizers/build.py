"""Which optimiser a configuration names."""

from __future__ import annotations

import torch
from torch import nn

from boost.config import TrainConfig
from boost.parallel.mesh import Mesh
from boost.training.optimizers.adamw import build_adamw
from boost.training.optimizers.loro import LORO
from boost.training.optimizers.muon import Muon


def build_optimizer(model: nn.Module, config: TrainConfig, mesh: Mesh) -> torch.optim.Optimizer:
    """The optimiser of this rank's share of the model.

    Each keeps, per parameter, `step` and moments of the parameter's shape, which are what checkpoints hold.
    """
    if config.optimizer.name == "loro":
        return LORO(model, config.optimizer, config.model, mesh)
    if config.optimizer.name == "muon":
        return Muon(model, config.optimizer, mesh)
    return build_adamw(model, config.optimizer)
