"""Every shipped preset loads, and is what its source states; `model/test_meta.py` compares the sizes."""

from __future__ import annotations

import pytest

from boost.config import TrainConfig, preset_names

SIZES = ("60m", "130m", "350m", "1b", "7b")
METHODS = ("dense", "svd", "cola", "lax", "loro", "sltrain", "relora")
PAPER = [f"paper/{method}-{size}" for method in METHODS for size in SIZES]
SHORT = [f"cola-{size}" for size in SIZES]
OTHERS = ["quickstart", "bench-1024", "boost-3b", "boost-13b", "boost-30b"]
STEPS = dict(zip(SIZES, (10_000, 20_000, 60_000, 100_000, 150_000), strict=True))
STEPS_OF_SLTRAIN = dict(zip(SIZES, (11_000, 22_000, 65_000, 140_000, 150_000), strict=True))
WARM_START = dict(zip(SIZES, (2_500, 5_000, 15_000, 25_000, 40_000), strict=True))


def paper(method: str, size: str) -> TrainConfig:
    return TrainConfig.load(f"paper/{method}-{size}")


def test_the_presets_are_the_documented_ones() -> None:
    assert preset_names() == sorted(PAPER + SHORT + OTHERS)


@pytest.mark.parametrize("name", preset_names())
def test_preset_loads_and_stands_alone_when_written_out(name: str) -> None:
    config = TrainConfig.load(name)
    assert config.run.dir == f"runs/{name}"
    assert config.train.global_batch_size % (config.train.micro_batch_size * config.parallel.dp) == 0
    assert "extends" not in config.to_yaml()


@pytest.mark.parametrize("size", SIZES)
def test_a_short_name_stands_for_the_published_recipe(size: str) -> None:
    assert TrainConfig.load(f"cola-{size}", [f"run.dir=runs/paper/cola-{size}"]) == paper("cola", size)


@pytest.mark.parametrize("name", PAPER)
def test_recipes_share_what_the_lineage_shares(name: str) -> None:
    """Batch, sequence, vocabulary, untied tables, cosine to a tenth; the widths are those of the dense recipe."""
    config = TrainConfig.load(name, ["data.path=elsewhere"])
    size = name.rpartition("-")[2]
    model, dense = config.model, paper("dense", size).model
    assert config.data.path == "elsewhere"
    assert config.train.global_batch_size * config.train.sequence_length == 131_072
    if model.linear == "relora":
        assert config.train.steps + WARM_START[size] == STEPS[size]
    else:
        assert config.train.steps == (STEPS_OF_SLTRAIN if model.linear == "sltrain" else STEPS)[size]
    assert config.schedule.min_lr_ratio == 0.1
    assert (model.vocab_size, model.tie_embeddings, model.norm_eps) == (32_000, False, 1e-6)
    for field in ("hidden_size", "ffn_size", "layers", "heads", "kv_heads", "head_size"):
        assert getattr(model, field) == getattr(dense, field)


@pytest.mark.parametrize("size", SIZES)
def test_architectures_of_the_recipes(size: str) -> None:
    """CoLA's gate has no activation from 350M on; LaX is CoLA with crossings; SVD and LORO have bare products."""
    dense, svd, cola, lax, loro = (paper(method, size).model for method in METHODS[:5])
    rank = {"60m": 128, "130m": 256, "350m": 256, "1b": 512, "7b": 1024}[size]
    assert (dense.linear, dense.rank, dense.gate_activation) == ("dense", None, "silu")
    assert {model.rank for model in (svd, cola, lax, loro)} == {rank}
    assert {model.bottleneck_activation for model in (cola, lax)} == {"silu"}
    assert {model.bottleneck_activation for model in (svd, loro)} == {"none"}
    assert svd.gate_activation == loro.gate_activation == "silu"
    assert cola.gate_activation == lax.gate_activation == ("silu" if size in ("60m", "130m") else "none")
    assert (lax.crossing, loro.factor_init, cola.factor_init) == ("tensor", "xavier", "cola")


@pytest.mark.parametrize(
    ("size", "lr", "warmup", "micro"),
    [
        ("60m", 6e-3, 2_000, 256),
        ("130m", 3e-3, 2_000, 256),
        ("350m", 3e-3, 6_000, 64),
        ("1b", 2e-3, 10_000, 32),
        ("7b", 1e-3, 15_000, 16),
    ],
)
def test_cola_has_its_published_recipe(size: str, lr: float, warmup: int, micro: int) -> None:
    config = paper("cola", size)
    optimizer, schedule = config.optimizer, config.schedule
    assert (optimizer.lr, optimizer.betas, optimizer.eps) == (lr, (0.9, 0.999), 1e-8)
    assert (optimizer.weight_decay, optimizer.decay_norms, optimizer.clip) == (0.01, True, 0.5)
    assert (schedule.name, schedule.warmup_steps, config.train.micro_batch_size) == ("cosine", warmup, micro)


@pytest.mark.parametrize(
    ("size", "lr", "warmup", "every"),
    [
        ("60m", 1e-2, 1_000, 500),
        ("130m", 1e-2, 2_000, 500),
        ("350m", 1e-2, 2_000, 500),
        ("1b", 5e-3, 10_000, 200),
    ],
)
def test_loro_has_its_published_recipe(size: str, lr: float, warmup: int, every: int) -> None:
    config = paper("loro", size)
    optimizer, schedule = config.optimizer, config.schedule
    assert (optimizer.name, optimizer.lr, optimizer.betas, optimizer.eps) == ("loro", lr, (0.9, 0.999), 1e-6)
    assert (optimizer.weight_decay, optimizer.clip, optimizer.exact_every) == (0.0, None, every)
    assert (schedule.name, schedule.warmup_steps) == ("jagged_cosine", warmup)


@pytest.mark.parametrize(
    ("size", "warmup", "alpha", "density"),
    [
        ("60m", 1_100, 32, 0.03),
        ("130m", 2_200, 16, 0.03),
        ("350m", 6_500, 16, 0.03),
        ("1b", 10_000, 8, 0.03),
        ("7b", 15_000, 8, 0.05),
    ],
)
def test_sltrain_has_its_published_recipe(size: str, warmup: int, alpha: float, density: float) -> None:
    config = paper("sltrain", size)
    model, optimizer = config.model, config.optimizer
    assert (model.linear, model.rank, model.gate_activation) == ("sltrain", paper("cola", size).model.rank, "silu")
    assert (model.lora_alpha, model.sparse_density, model.sparse_support) == (alpha, density, "uniform")
    assert (optimizer.name, optimizer.lr, optimizer.betas, optimizer.eps) == ("adamw", 3e-3, (0.9, 0.999), 1e-8)
    assert (optimizer.weight_decay, optimizer.clip) == (0.0, 1.0 if size == "7b" else None)
    assert (config.schedule.name, config.schedule.warmup_steps) == ("cosine", warmup)


@pytest.mark.parametrize("size", SIZES)
def test_relora_has_what_its_authors_ran_at_250m(size: str) -> None:
    """And at least three cycles after its warm start, which is another run."""
    config = paper("relora", size)
    model, optimizer, schedule = config.model, config.optimizer, config.schedule
    assert (model.linear, model.rank, model.lora_alpha, model.lora_dropout) == ("relora", 128, 32.0, 0.1)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.clip) == (1e-3, 0.0, 1.0)
    assert (schedule.name, schedule.warmup_steps, schedule.restart_warmup_steps) == ("jagged_cosine", 500, 100)
    assert optimizer.restart_every == (2_500 if size == "60m" else 5_000)
    assert (optimizer.betas, optimizer.eps) == ((0.9, 0.999), 1e-8)
    assert config.data.seed != paper("dense", size).data.seed, "the warm start's order would come again"
    assert config.run.init_from == f"runs/paper/relora-{size}-start"


@pytest.mark.parametrize("size", SIZES)
def test_dense_recipes_are_what_their_comments_say(size: str) -> None:
    config = paper("dense", size)
    optimizer = config.optimizer
    assert optimizer.lr == (5e-4 if size in ("1b", "7b") else 1e-3)
    assert (optimizer.betas, optimizer.eps) == ((0.9, 0.999), 1e-8)
    assert (optimizer.weight_decay, optimizer.clip) == (0.0, None)
    assert (config.schedule.name, config.schedule.warmup_steps) == ("cosine", STEPS[size] // 10)


@pytest.mark.parametrize("size", SIZES)
def test_svd_and_lax_recipes_are_colas_but_for_the_model(size: str) -> None:
    for method in ("svd", "lax"):
        config, cola = paper(method, size), paper("cola", size)
        for section in ("data", "optimizer", "schedule", "train"):
            assert getattr(config, section) == getattr(cola, section)


@pytest.mark.parametrize(("size", "tp"), [("3b", 2), ("13b", 4), ("30b", 4)])
def test_boost_shapes(size: str, tp: int) -> None:
    config = TrainConfig.load(f"boost-{size}")
    assert config.model.rank == config.model.hidden_size // 4
    assert config.model.tie_embeddings
    assert (config.train.sequence_length, config.parallel.tp) == (4096, tp)
