"""A tiny dataset, and configurations that train on it in a second."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from boost.config import TrainConfig
from boost.data.prepare import prepare


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 6,000 tokens of repetitive text in 40 documents, 4 of them held out."""
    directory = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    words = ["the", "of", "and", "to", "in", "a", "that", "is", "was", "he", "for", "it", "with", "as", "his", "on"]
    documents = [" ".join(draw.choice(words) for _ in range(150)) for _ in range(40)]
    source = directory / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prepare([str(source)], directory / "tokens", "bpe4096", validation_last=4)
    return directory / "tokens"


@pytest.fixture
def settings(dataset: Path, tmp_path: Path) -> dict[str, Any]:
    """A tiny fp64 run of 6 steps in tmp_path/run, as nested sections."""
    return tiny_settings(dataset, tmp_path / "run")


def tiny_settings(dataset: Path, run: Path) -> dict[str, Any]:
    """A tiny fp64 run of 6 steps, as nested sections."""
    return {
        "model": {
            "hidden_size": 32,
            "ffn_size": 44,
            "layers": 2,
            "heads": 4,
            "rank": 6,
            "vocab_size": 4096,
            "norm_eps": 1e-5,
        },
        "data": {"path": str(dataset)},
        "optimizer": {"lr": 1e-2, "clip": 0.5, "weight_decay": 0.1},
        "schedule": {"warmup_steps": 2},
        "train": {
            "steps": 6,
            "sequence_length": 16,
            "global_batch_size": 4,
            "precision": "fp64",
            "device": "cpu",
        },
        "checkpoint": {"every": 0},
        "run": {"dir": str(run)},
        "logging": {"tensorboard": False, "plots": False},
    }


def with_changes(settings: dict[str, Any], **changes: Any) -> TrainConfig:
    """The settings with `section__field=value` changed."""
    content = {section: dict(fields) for section, fields in settings.items()}
    for name, value in changes.items():
        section, field = name.split("__")
        content.setdefault(section, {})[field] = value
    return TrainConfig.from_dict(content)
