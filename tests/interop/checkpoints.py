"""Checkpoints of small random models, written as a run writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boost.checkpoint.slices import Slice
from boost.checkpoint.store import save
from boost.checkpoint.weights import support_slices
from boost.config import ModelSection, TrainConfig
from boost.data.tokenizer import read_tokenizer
from boost.parallel.mesh import Group
from tests.models import build, model_section, perturbed, tensors


def random_weights(model: ModelSection, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Canonical tensors with gains, biases and (in SLTrain they start at zero) B that matter."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=dtype) / 8 if not value.any() else value
        for name, value in perturbed(tensors(build(model, dtype=dtype))).items()
    }


def write_checkpoint(root: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """`root/step-3` of a small model."""
    model = model_section(**changes)
    config = TrainConfig.from_dict({"model": model.model_dump(exclude_none=True), "train": {"sequence_length": 64}})
    slices = [
        Slice(name, "parameter", tuple(value.shape), (0,) * value.dim(), value)
        for name, value in random_weights(model, dtype).items()
    ]
    slices += support_slices(build(model, dtype=dtype), Group())
    files = {"config.yaml": config.to_yaml().encode(), "tokenizer.json": read_tokenizer("bpe4096")[1]}
    root.mkdir(parents=True, exist_ok=True)
    return save(root / "checkpoints", 3, slices, {"step": 3, "optimizer_steps": 3}, files=files)
