"""Muon against torch's on whole matrices, every layout against one process, and what it communicates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from boost.config import OptimizerSection, TrainConfig
from boost.parallel.collectives import count_collectives
from boost.parallel.mesh import Mesh
from boost.parallel.sharding import described
from boost.training.loop import build_model
from boost.training.optimizers.build import build_optimizer
from boost.training.optimizers.muon import Muon, newton_schulz
from tests.distributed.harness import run_ranks
from tests.models import build, distance, loss_and_gradients, model_section, tensors, tokens, worst
from tests.training.test_loro import settings_of, take_steps

SECTION = {"name": "muon", "lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}


def test_it_is_torchs_muon_and_adamw_on_single_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of grouped, unequally wide factors, with torch's iterations in fp64 instead of bf16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    model = build(model_section(kv_heads=2, attention_bias=True, rank=14))
    optimizer = Muon(model, OptimizerSection.model_validate(SECTION), Mesh())
    reference = {name: torch.nn.Parameter(value) for name, value in tensors(model).items()}
    factors = [p for name, p in reference.items() if name.startswith("blocks") and p.dim() == 2]
    assert len(factors) == 2 * 7 * 2
    vectors = [p for p in reference.values() if p.dim() == 1]
    wide = [reference[name] for name in ("embedding.weight", "head.weight")]
    theirs = [
        torch.optim.Muon(factors, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": wide, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=1e-2,
            betas=(0.9, 0.95),
            eps=1e-6,
        ),
    ]
    for step in range(3):
        _, gradients = loss_and_gradients(model, *tokens(model.model, seed=step))
        for name, gradient in gradients.items():
            reference[name].grad = gradient
        optimizer.step()
        for other in theirs:
            other.step()
    error, name = worst(tensors(model), {name: p.detach() for name, p in reference.items()})
    assert error <= 1e-10, name


def test_in_fp32_it_is_close_to_fp64() -> None:
    """Grams see singular values only down to their rounding, below which the iterations hardly depend on them."""
    start = torch.randn(40, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = start * torch.logspace(0, -5, 8, dtype=torch.float64)
    narrow = x.float()
    assert distance(narrow @ newton_schulz(narrow.t() @ narrow), x @ newton_schulz(x.t() @ x)) <= 1e-5


def settings(**layout: int) -> TrainConfig:
    return settings_of(optimizer=SECTION, bottleneck_activation="silu", **layout)


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, Tensor]]:
    return take_steps(Mesh(), settings())


@pytest.mark.parametrize(
    "layout",
    [{"tp": 4}, {"dp": 2, "tp": 2, "zero": 1}, {"dp": 4, "zero": 3, "replicate": 2}, {"pp": 2, "tp": 2}],
    ids=str,
)
def test_every_layout_takes_the_steps_of_one_process(
    layout: dict[str, int], alone: tuple[list[float], dict[str, Tensor]]
) -> None:
    """Losses and every parameter, to 1e-9 in float64, on every rank."""
    expected_losses, expected = alone
    config = settings(**layout)
    parallel = config.parallel
    shape = (parallel.pp, parallel.dp, parallel.tp)
    results = run_ranks(math.prod(shape), take_steps, config, layout=shape, shards=parallel.shards)
    assert set().union(*(whole for _, whole in results)) == set(expected)
    for seen, whole in results:
        assert seen == pytest.approx(expected_losses, rel=1e-9)
        error, name = worst(whole, {name: expected[name] for name in whole})
        assert error <= 1e-9, name


def communicated(mesh: Mesh, config: TrainConfig) -> list[tuple[str, int]]:
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config, mesh)
    for parameter, _parts in described(model):
        parameter.grad = torch.ones_like(parameter)
    with count_collectives() as collectives:
        optimizer.step()
    return [(c.name, c.elements) for c in collectives]


def test_what_is_communicated() -> None:
    """r^2 numbers per factor, whatever its width, in one bucket."""
    factors, rank = 2 * 7 * 2, 6
    assert run_ranks(2, communicated, settings(tp=2)) == [[("all_reduce", factors * rank**2)]] * 2
