"""LORO: the exact step against its dense formula, every layout against one process, collectives, refusals, resuming."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from boost.config import TrainConfig
from boost.errors import NumericsError
from boost.parallel.collectives import Collective, count_collectives
from boost.parallel.mesh import Mesh
from boost.parallel.sharding import described
from boost.training.batches import Batch, MicroBatch
from boost.training.loop import build_model, update
from boost.training.optimizers.build import build_optimizer
from boost.training.optimizers.factors import factor_pairs
from boost.training.optimizers.retraction import SingularGramError, coefficients, grams
from tests.distributed.harness import run_ranks
from tests.models import distance, load, perturbed, tensors, worst
from tests.training.conftest import with_changes
from tests.training.runs import losses, run, state_hash

STEPS, EXACT_EVERY, BATCH = 5, 2, 8
LORO = {"name": "loro", "exact_every": EXACT_EVERY, "lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1}


def published_exact_step(m: Tensor, n: Tensor, dm: Tensor, dn: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """LORO's exact step as published, on whole factors, with QR decompositions."""
    u, r_m = torch.linalg.qr(m)
    v, r_n = torch.linalg.qr(n)
    z_m = torch.linalg.solve_triangular(r_n, dm, upper=True, left=False)
    z_n = torch.linalg.solve_triangular(r_m, dn, upper=True, left=False)
    k0 = z_n.t() @ v
    q1, k1 = torch.linalg.qr(z_n - v @ k0.t())
    q2, k2 = torch.linalg.qr(z_m - u @ (u.t() @ z_m))
    top = torch.cat([r_m @ r_n.t() - eta * k0, -eta * k1.t()], dim=1)
    left, values, right = torch.linalg.svd(torch.cat([top, torch.cat([-eta * k2, torch.zeros_like(k2)], dim=1)]))
    rank = m.shape[1]
    scale = values[:rank].sqrt()
    return torch.cat([u, q2], 1) @ left[:, :rank] * scale, torch.cat([v, q1], 1) @ right.t()[:, :rank] * scale


def our_exact_step(m: Tensor, n: Tensor, dm: Tensor, dn: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    by_m, by_dm, by_n, by_dn = coefficients(grams(m, n, dm, dn), eta)
    return m @ by_m + dm @ by_dm, n @ by_n + dn @ by_dn


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("eta", [1e-2, 1e-3])
@pytest.mark.parametrize(("d_out", "d_in", "rank"), [(40, 28, 7), (33, 20, 16), (96, 64, 32)])
@pytest.mark.parametrize("condition", [1.0, 1e3])
def test_the_exact_step_is_the_published_one(eta: float, d_out: int, d_in: int, rank: int, condition: float) -> None:
    """Relative to the step itself, also where fewer than `rank` directions lie outside; and the result is balanced."""
    stretch = torch.logspace(0, -torch.tensor(condition).log10().item(), rank, dtype=torch.float64)
    m, n = random(d_out, rank, seed=1) * stretch, random(d_in, rank, seed=2)
    dm, dn = random(d_out, rank, seed=3).sign(), random(d_in, rank, seed=4).sign()
    new_m, new_n = our_exact_step(m, n, dm, dn, eta)
    theirs_m, theirs_n = published_exact_step(m, n, dm, dn, eta)
    before = m @ n.t()
    assert distance(new_m @ new_n.t() - before, theirs_m @ theirs_n.t() - before) <= 1e-9
    values = torch.linalg.svdvals(new_m @ new_n.t())[:rank]
    for factor in (new_m, new_n):
        torch.testing.assert_close(factor.t() @ factor, values.diag(), rtol=1e-8, atol=1e-8 * values[0].item())


def test_it_is_the_best_matrix_near_the_tangent_step() -> None:
    """With dM = G N and dN = G^T M of one gradient G: the SVD of W - eta (G P_V + P_U G - P_U G P_V), cut."""
    m, n, g = random(30, 5, seed=1), random(22, 5, seed=2), random(30, 22, seed=3)
    p_u, p_v = (torch.linalg.qr(x)[0] @ torch.linalg.qr(x)[0].t() for x in (m, n))
    target = m @ n.t() - 0.05 * (g @ p_v + p_u @ g - p_u @ g @ p_v)
    left, values, right = torch.linalg.svd(target)
    new_m, new_n = our_exact_step(m, n, g @ n, g.t() @ m, 0.05)
    assert distance(new_m @ new_n.t(), left[:, :5] * values[:5] @ right[:5]) <= 1e-12


def test_no_gradient_no_step() -> None:
    m, n = random(9, 3, seed=1), random(7, 3, seed=2)
    new_m, new_n = our_exact_step(m, n, torch.zeros_like(m), torch.zeros_like(n), 0.1)
    assert distance(new_m @ new_n.t(), m @ n.t()) <= 1e-13


@pytest.mark.parametrize("factor", ["A", "B"])
@pytest.mark.parametrize("how", ["zero", "repeated", "wide"])
def test_a_factor_that_has_lost_rank_is_named(factor: str, how: str) -> None:
    lost, other = random(9, 4, seed=1), random(12, 4, seed=2)
    lost[:, 1] = 0 if how == "zero" else lost[:, 3]
    lost = random(3, 4, seed=3) if how == "wide" else lost
    m, n = (lost, other) if factor == "B" else (other, lost)
    with pytest.raises(SingularGramError, match=factor):
        coefficients(grams(m, n, torch.ones_like(m), torch.ones_like(n)), 0.1)


def settings_of(
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    zero: int = 0,
    replicate: int = 1,
    optimizer: dict[str, Any] = LORO,
    **model: Any,
) -> TrainConfig:
    """Sizes that divide neither over tp nor over dp, biases, GQA and tied embeddings."""
    sizes = {"hidden_size": 36, "ffn_size": 43, "layers": 2, "heads": 4, "kv_heads": 4, "head_size": 6}
    more = {"vocab_size": 51, "rank": 6, "bottleneck_activation": "none", "init_std": 0.3, "tie_embeddings": True}
    return TrainConfig.from_dict(
        {
            "model": {**sizes, **more, "attention_bias": True, **model},
            "optimizer": optimizer,
            "train": {"precision": "fp64", "global_batch_size": BATCH, "micro_batch_size": 2, "sequence_length": 8},
            "parallel": {"pp": pp, "dp": dp, "tp": tp, "zero": zero, "dp_replicate": replicate},
        }
    )


def take_steps(mesh: Mesh, config: TrainConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of five steps, and whole canonical parameters of this rank's stage after them."""
    model = build_model(config, mesh)
    load(model, perturbed(tensors(build_model(settings_of(), Mesh()))), mesh.tp)
    optimizer = build_optimizer(model, config, mesh)
    generator = torch.Generator().manual_seed(5)
    per_rank, seen = BATCH // mesh.dp.size, []
    for step in range(STEPS):
        ids = torch.randint(config.model.vocab_size, (BATCH, 9), generator=generator)
        labels = ids[:, 1:].clone()
        for row in range(BATCH):
            labels[row, : row // 2] = -100
        mine = torch.arange(BATCH)[mesh.dp.rank * per_rank :][:per_rank]
        micro = [MicroBatch(ids[i, :-1], labels[i], range(int(i[0]), int(i[-1]) + 1)) for i in mine.split(2)]
        batch = Batch(micro, int((labels != -100).sum()), "")
        seen.append(update(model, optimizer, batch, 1e-2, None, mesh, step, zero=config.parallel.zero)[0])
    return seen, tensors(model, tp=mesh.tp, shards=mesh.shards)


def trained(mesh: Mesh, config: TrainConfig) -> tuple[list[float], dict[str, Tensor]]:
    """The same with products in place of factors, whose signs are free; two of the steps are exact."""
    seen, whole = take_steps(mesh, config)
    for up in [name for name in whole if name.startswith("blocks") and name.endswith(".up.weight")]:
        linear = up.removesuffix(".up.weight")
        whole[linear] = whole.pop(up) @ whole.pop(f"{linear}.down.weight")
    return seen, whole


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, Tensor]]:
    return trained(Mesh(), settings_of())


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"tp": 4},
        {"dp": 2},
        {"dp": 2, "tp": 2},
        {"dp": 2, "tp": 2, "zero": 1},
        {"dp": 4, "zero": 3, "replicate": 2},
        {"pp": 2, "tp": 2},
    ],
    ids=str,
)
def test_every_layout_takes_the_steps_of_one_process(
    layout: dict[str, int], alone: tuple[list[float], dict[str, Tensor]]
) -> None:
    """Losses, products, biases, gains and embedding after two exact steps, to 1e-9 in float64, on every rank."""
    expected_losses, expected = alone
    config = settings_of(**layout)
    parallel = config.parallel
    shape = (parallel.pp, parallel.dp, parallel.tp)
    results = run_ranks(math.prod(shape), trained, config, layout=shape, shards=parallel.shards)
    assert set().union(*(whole for _, whole in results)) == set(expected)
    for seen, whole in results:
        assert seen == pytest.approx(expected_losses, rel=1e-9)
        error, name = worst(whole, {name: expected[name] for name in whole})
        assert error <= 1e-9, name


def collectives_of_steps(mesh: Mesh, config: TrainConfig) -> list[list[Collective]]:
    """What the optimiser communicates in an approximate and in an exact step."""
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config, mesh)
    seen = []
    for _ in range(EXACT_EVERY):
        for parameter, _parts in described(model):
            parameter.grad = torch.ones_like(parameter)
        with count_collectives() as collectives:
            optimizer.step()
        seen.append(list(collectives))
    return seen


def test_what_is_communicated() -> None:
    """Nothing in an approximate step; in an exact one 6 r^2 summed and 4 r^2 + 1 sent per linear, of any width."""
    config, linears, rank = settings_of(tp=2), 2 * 7, 6
    for approximate, exact in run_ranks(2, collectives_of_steps, config):
        assert approximate == []
        sums = [c for c in exact if c.name == "all_reduce"]
        sent = [c for c in exact if c.name != "all_reduce"]
        assert [(c.elements, c.bytes) for c in sums] == [(6 * rank**2, 48 * rank**2)] * linears
        assert [c.elements for c in sent] == [4 * rank**2 + 1] * linears and {c.name for c in sent} == {"broadcast_"}


def singular(mesh: Mesh, config: TrainConfig) -> str:
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config, mesh)
    pair = factor_pairs(model)[3]
    if mesh.pp.rank == 0:
        with torch.no_grad():
            pair.up.part.view(pair.up.parameter, mesh.tp)[:, 2] = 0
    for parameter, _parts in described(model):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with pytest.raises(NumericsError) as error:
        optimizer.step()
    return str(error.value)


def test_all_ranks_name_a_pair_that_has_lost_rank() -> None:
    for message in run_ranks(4, singular, settings_of(dp=2, tp=2), layout=(1, 2, 2)):
        assert message.startswith("blocks.0.attention.o: factor B has lost rank (its Gram matrix is singular), so")
        assert "\n" not in message


def test_all_pipeline_stages_stop_when_one_has_lost_rank() -> None:
    here, other = run_ranks(2, singular, settings_of(pp=2), layout=(2, 1, 1))
    assert here.startswith("blocks.0.attention.o: factor B has lost rank")
    assert other.startswith("another pipeline stage: a factor has lost rank")


@pytest.mark.parametrize("then", [{}, {"parallel__tp": 2}], ids=str)
def test_a_run_goes_on_in_the_middle_of_a_cycle(then: dict[str, int], settings: dict[str, Any], tmp_path: Path) -> None:
    """Stopped one step after an exact step, it takes the next one when the run that never stopped does."""
    settings["model"]["bottleneck_activation"] = "none"
    settings["optimizer"] = {**LORO, "exact_every": 3}
    whole = with_changes(settings, run__dir=str(tmp_path / "whole"), train__steps=7, schedule__name="constant")
    run(whole)
    parts: dict[str, Any] = {"run__dir": str(tmp_path / "parts"), "schedule__name": "constant"}
    run(with_changes(settings, train__steps=4, **parts))
    last = with_changes(settings, train__steps=7, **parts, **then)
    run(last)
    assert losses(last) == pytest.approx(losses(whole), rel=1e-10)
    assert then or state_hash(last) == state_hash(whole)
