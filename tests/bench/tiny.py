"""A configuration on which the bench takes seconds."""

from __future__ import annotations

from typing import Any

from boost.config import TrainConfig

TINY = {
    "model.hidden_size": 64,
    "model.ffn_size": 128,
    "model.layers": 1,
    "model.heads": 4,
    "model.rank": 16,
    "model.vocab_size": 64,
    "train.sequence_length": 16,
    "train.global_batch_size": 2,
}


def tiny_overrides(**parallel: Any) -> list[str]:
    """On the command line, over `bench-1024` (bf16)."""
    fields = TINY | {f"parallel.{name}": value for name, value in parallel.items()}
    return [f"{name}={value}" for name, value in fields.items()]


def tiny_config(**parallel: Any) -> TrainConfig:
    return TrainConfig.load("bench-1024", tiny_overrides(**parallel))
