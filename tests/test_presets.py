"""Every shipped preset loads, and is what its source states; `model/test_meta.py` compares the sizes."""

from __future__ import annotations

import pytest

from boost.config import TrainConfig, preset_names

SIZES = ("60m", "130m", "350m", "1b", "7b")
PUBLISHED = ["quickstart", *(f"{kind}-{size}" for kind in ("cola", "llama", "svd") for size in SIZES)]
PUBLISHED += ["boost-3b", "boost-13b", "boost-30b"]
OURS = ["bench-1024"]


def test_the_presets_are_the_documented_ones() -> None:
    assert preset_names() == sorted(PUBLISHED + OURS)


@pytest.mark.parametrize("name", preset_names())
def test_preset_loads_and_stands_alone_when_written_out(name: str) -> None:
    config = TrainConfig.load(name)
    assert config.run.dir == f"runs/{name}"
    assert config.train.global_batch_size % (config.train.micro_batch_size * config.parallel.dp) == 0
    assert "extends" not in config.to_yaml()


@pytest.mark.parametrize("size", SIZES)
def test_activations_tell_the_kinds_apart(size: str) -> None:
    cola, svd, llama = (TrainConfig.load(f"{kind}-{size}").model for kind in ("cola", "svd", "llama"))
    assert (cola.bottleneck_activation, svd.bottleneck_activation) == ("silu", "none")
    assert cola.gate_activation == ("silu" if size in ("60m", "130m") else "none")
    assert svd.gate_activation == llama.gate_activation == "silu"
    assert (llama.linear, llama.rank) == ("dense", None)


@pytest.mark.parametrize(
    ("size", "lr", "warmup", "steps", "micro"),
    [
        ("60m", 6e-3, 2_000, 10_000, 256),
        ("130m", 3e-3, 2_000, 20_000, 256),
        ("350m", 3e-3, 6_000, 60_000, 64),
        ("1b", 2e-3, 10_000, 100_000, 32),
        ("7b", 1e-3, 15_000, 150_000, 16),
    ],
)
def test_cola_has_its_published_recipe(size: str, lr: float, warmup: int, steps: int, micro: int) -> None:
    config = TrainConfig.load(f"cola-{size}")
    optimizer, schedule, train = config.optimizer, config.schedule, config.train
    assert (optimizer.lr, optimizer.betas, optimizer.eps) == (lr, (0.9, 0.999), 1e-8)
    assert (optimizer.weight_decay, optimizer.decay_norms, optimizer.clip) == (0.01, True, 0.5)
    assert (schedule.name, schedule.warmup_steps, schedule.min_lr_ratio) == ("cosine", warmup, 0.1)
    assert (train.steps, train.micro_batch_size) == (steps, micro)
    assert train.global_batch_size * train.sequence_length == 131_072


@pytest.mark.parametrize(("size", "tp"), [("3b", 2), ("13b", 4), ("30b", 4)])
def test_boost_shapes(size: str, tp: int) -> None:
    config = TrainConfig.load(f"boost-{size}")
    assert config.model.rank == config.model.hidden_size // 4
    assert config.model.tie_embeddings
    assert (config.train.sequence_length, config.parallel.tp) == (4096, tp)
