"""What a run says of itself before its first step."""

from __future__ import annotations

import pytest

from boost.config import TrainConfig
from boost.model import costs
from boost.training.console import state_bytes


@pytest.mark.parametrize(
    ("zero", "precision", "replicate", "expected"),
    [
        (0, "bf16", 1, 16),
        (1, "bf16", 1, 6 + 12 / 4),
        (2, "bf16", 1, 2 + 16 / 4),
        (3, "bf16", 1, 16 / 4),
        (3, "bf16", 2, 16 / 2),
        (1, "fp32", 1, 8 + 12 / 4),
        (2, "fp64", 2, 8 + 32 / 2),
    ],
)
def test_memory_per_parameter(zero: int, precision: str, replicate: int, expected: float) -> None:
    """As tests/distributed/test_zero.py measures it; tp and pp divide all of it."""
    config = TrainConfig.from_dict(
        {
            "model": {"hidden_size": 32, "layers": 2, "heads": 4, "ffn_size": 64, "vocab_size": 64},
            "train": {"global_batch_size": 8, "micro_batch_size": 1, "precision": precision},
            "parallel": {"tp": 2, "pp": 2, "dp": 4, "zero": zero, "dp_replicate": replicate},
        }
    )
    assert state_bytes(config) * 4 / costs.parameters(config.model) == pytest.approx(expected)


def test_frozen_matrices_have_neither_gradients_nor_moments() -> None:
    model = {"linear": "relora", "hidden_size": 32, "layers": 2, "heads": 4, "ffn_size": 64, "vocab_size": 64}
    config = TrainConfig.from_dict({"model": model, "train": {"precision": "fp32"}})
    frozen = 2 * costs.block_frozen_parameters(config.model)
    assert frozen > 0
    assert state_bytes(config) == 16 * (costs.parameters(config.model) - frozen) + 4 * frozen
