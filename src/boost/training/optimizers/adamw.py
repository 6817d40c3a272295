"""AdamW on fp32 master weights (Loshchilov and Hutter, 2019): torch's fused implementation, and what it decays."""

from __future__ import annotations

import torch
from torch import nn

from boost.config import OptimizerSection
from boost.parallel.sharding import described

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_adamw(model: nn.Module, config: OptimizerSection) -> torch.optim.AdamW:
    """AdamW over the model's trainable parameters, its state allocated at once so that a checkpoint always holds it.

    Matrices are decayed; norm gains and biases only with `decay_norms`.
    """
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for parameter, parts in described(model):
        if not parameter.requires_grad:
            continue
        (decayed if config.decay_norms or parts[0].decayed else spared).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }
    return optimizer
