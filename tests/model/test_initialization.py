"""Initial weights are a function of seed and canonical name alone, and padding is never anything but zero."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from boost.config import ModelSection, OptimizerSection, ParallelSection
from boost.model.decoder import Decoder
from boost.parallel.mesh import Group, Mesh
from boost.parallel.sharding import canonical_names, described
from boost.training.optimizers.adamw import build_adamw
from tests.distributed.harness import run_ranks
from tests.models import build, model_section, tensors, tokens

LOW_RANK = ["btp", "vanilla", "vanilla_sharded_heads"]


def uneven(linear: str = "low_rank", **changes: Any) -> ModelSection:
    """Neither d_ff, nor the vocabulary, nor (in vanilla) the rank divides over 2 or 4 ranks; GQA widths at tp <= 2."""
    rank = {} if linear == "dense" else {"rank": 7}
    return model_section(
        linear=linear, ffn_size=43, vocab_size=51, attention_bias=True, mlp_bias=True, **rank, **changes
    )


def layouts(linear: str) -> list[ParallelSection]:
    tensor_layouts = LOW_RANK if linear == "low_rank" else ["btp"]
    return [
        ParallelSection(tensor_layout=layout, group_linears=grouped)  # type: ignore[arg-type]
        for layout, grouped in itertools.product(tensor_layouts, [True, False])
    ]


def differing(mesh: Mesh, kv_heads: int) -> list[Any]:
    """Models whose initial tensors are not, bit for bit, those of one process, ungrouped."""
    wrong = []
    every = itertools.product(["low_rank", "dense", "relora"], [False, True], ["cola"])
    for linear, tied, init in [*every, ("low_rank", False, "xavier")]:
        model = uneven(linear, kv_heads=kv_heads, tie_embeddings=tied, factor_init=init)
        expected = tensors(build(model, ParallelSection(group_linears=False), dtype=torch.float32))
        for parallel in layouts(linear):
            decoder = build(model, parallel, mesh.tp, torch.float32)
            found = tensors(decoder)
            assert found.keys() == canonical_names(decoder).keys()
            same = found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)
            if not same:
                wrong.append((linear, tied, init, parallel.tensor_layout, parallel.group_linears))
    return wrong


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_initial_tensors_do_not_depend_on_the_layout(tp: int) -> None:
    """Equal bit for bit for every tp, layout and grouping, uneven sizes, GQA, ties and biases included."""
    kv_heads = max(2, tp)
    results = [differing(Mesh(), kv_heads)] if tp == 1 else run_ranks(tp, differing, kv_heads)
    assert results == [[]] * len(results)


def test_precision_rounds_the_same_values() -> None:
    """fp64 and bf16 (whose masters are fp32) start from the fp32 values."""
    model = uneven()
    single = tensors(build(model, dtype=torch.float32))
    for dtype, held in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        other = tensors(build(model, dtype=dtype))
        assert all(other[name].dtype == held and torch.equal(other[name], single[name].to(held)) for name in single)


WIDTHS = {"q": (384, 384), "k": (384, 96), "v": (384, 96), "o": (384, 384)}
WIDTHS |= {"gate": (384, 1000), "up": (384, 1000), "down": (1000, 384)}


def wide(**changes: Any) -> ModelSection:
    """Large enough to estimate a standard deviation; its linears are WIDTHS."""
    fields: dict[str, Any] = {"hidden_size": 384, "ffn_size": 1000, "layers": 1, "heads": 4, "kv_heads": 1}
    return ModelSection(**fields, vocab_size=1200, rank=96, **changes)


def test_factors_have_the_standard_deviation_of_loro() -> None:
    """A sqrt(2 / (d_in + r)) and B sqrt(2 / (d_out + r)) within 2 %, zero mean; the rest is as by default."""
    found, default = (tensors(build(wide(factor_init=init), dtype=torch.float32)) for init in ("xavier", "cola"))
    for linear, (d_in, d_out) in WIDTHS.items():
        prefix = f"blocks.0.{'attention' if linear in 'qkvo' else 'mlp'}.{linear}"
        for factor, width in (("down", d_in), ("up", d_out)):
            value = found.pop(f"{prefix}.{factor}.weight")
            expected = (2 / (width + 96)) ** 0.5
            assert float(value.std()) == pytest.approx(expected, rel=0.02)
            assert abs(float(value.mean())) < 0.02 * expected
    assert len(found) == 5  # tables and gains
    assert all(torch.equal(value, default[name]) for name, value in found.items())


def test_factors_have_the_standard_deviation_of_cola() -> None:
    """Both factors r^-1/4 (d_in + d_out)^-1/4 within 2 %, so that A B has (d_in + d_out)^-1/2; zero mean."""
    model = wide()
    found = tensors(build(model, dtype=torch.float32))
    for linear, (d_in, d_out) in WIDTHS.items():
        prefix = f"blocks.0.{'attention' if linear in 'qkvo' else 'mlp'}.{linear}"
        down, up = found[f"{prefix}.down.weight"], found[f"{prefix}.up.weight"]
        assert down.shape == (96, d_in)
        assert up.shape == (d_out, 96)
        expected = 96**-0.25 * (d_in + d_out) ** -0.25
        for factor in (down, up):
            assert float(factor.std()) == pytest.approx(expected, rel=0.02)
            assert abs(float(factor.mean())) < 0.02 * expected
        assert float((up @ down).std()) == pytest.approx((d_in + d_out) ** -0.5, rel=0.05)
    for table in ("embedding.weight", "head.weight"):
        assert float(found[table].std()) == pytest.approx(model.init_std, rel=0.02)
    for gain in ("norm.weight", "blocks.0.attention.norm.weight", "blocks.0.mlp.norm.weight"):
        assert torch.equal(found[gain], torch.ones(384))


def test_dense_linears_have_the_standard_deviation_of_llama() -> None:
    """init_std within 2 %, and biases start at zero."""
    model = ModelSection(
        linear="dense", hidden_size=256, ffn_size=400, layers=1, heads=4, vocab_size=300, mlp_bias=True
    )
    found = tensors(build(model, dtype=torch.float32))
    deviations = [float(value.std()) for value in found.values() if value.dim() == 2]
    assert len(deviations) == 9
    assert max(deviations) <= 1.02 * model.init_std
    assert min(deviations) >= 0.98 * model.init_std
    assert not found["blocks.0.mlp.gate.bias"].any()


def test_seeds_and_names_draw_different_values() -> None:
    """No two random tensors are correlated, be it by seed, by layer or by linear."""
    model = uneven(hidden_size=64, heads=4, head_size=16)
    models = [tensors(build(model, dtype=torch.float32, seed=seed)) for seed in (1, 2)]
    drawn = [(seed, name) for seed in (0, 1) for name, value in models[seed].items() if value.dim() == 2]
    assert len(drawn) == 2 * (2 + 14 * model.layers)
    flat: list[Tensor] = [models[seed][name].flatten() for seed, name in drawn]
    for one, other in itertools.combinations(range(len(flat)), 2):
        n = min(len(flat[one]), len(flat[other]))
        correlation = statistics.correlation(flat[one][:n].tolist(), flat[other][:n].tolist())
        assert abs(correlation) < 6 / n**0.5, (drawn[one], drawn[other])
    biases = [value for seed in (0, 1) for name, value in models[seed].items() if name.endswith(".bias")]
    assert all(float(bias.abs().max()) <= len(bias) ** -0.5 for bias in biases)
    assert all(float(bias.abs().max()) > 0.5 * len(bias) ** -0.5 for bias in biases)


def padding(decoder: Decoder, group: Group) -> dict[str, Tensor]:
    """The elements of each parameter that no canonical tensor covers; absent where there are none."""
    found = {}
    for parameter, parts in described(decoder):
        uncovered = torch.ones_like(parameter, dtype=torch.bool)
        for part in parts:
            part.view(uncovered, group).fill_(False)
        if uncovered.any():
            found[parts[0].name] = parameter.detach()[uncovered]
    return found


def run_padding(mesh: Mesh) -> list[tuple[Any, dict[str, float], dict[str, float], float]]:
    """Per model, the largest magnitude in each padding before and after three decayed steps, and how far those went."""
    found = []
    for linear in ("low_rank", "dense"):
        model = uneven(linear, kv_heads=4, layers=1)
        for parallel in layouts(linear):
            decoder = build(model, parallel, mesh.tp, torch.float32)
            optimizer = build_adamw(decoder, OptimizerSection(lr=0.05, weight_decay=0.5, decay_norms=True))
            first = {name: float(value.abs().max()) for name, value in padding(decoder, mesh.tp).items()}
            before = [parameter.detach().clone() for parameter in decoder.parameters()]
            for step in range(3):
                ids, labels = tokens(model, seed=step)
                optimizer.zero_grad()
                (decoder.loss(ids, labels) / (labels != -100).sum()).backward()
                optimizer.step()
            last = {name: float(value.abs().max()) for name, value in padding(decoder, mesh.tp).items()}
            after = [parameter.detach() for parameter in decoder.parameters()]
            moved = min(float((new - old).abs().max()) for new, old in zip(after, before, strict=True))
            found.append(((linear, parallel.tensor_layout, parallel.group_linears), first, last, moved))
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_padding_is_zero_and_stays_zero(tp: int) -> None:
    """d_ff 43, vocabulary 51 and, in vanilla, rank 7: after three AdamW steps with decay every pad is exactly zero."""
    last_rank = run_ranks(tp, run_padding)[-1]
    for case, first, last, moved in last_rank:
        linear, layout, grouped = case
        assert moved > 0.05, case
        gate, up, down = (f"blocks.0.mlp.{name}" for name in ("gate", "up", "down"))
        expected = {"head.weight"}
        if linear == "dense":
            expected |= {f"{gate}.weight", f"{gate}.bias", f"{down}.weight", "embedding.weight"}
            expected |= set() if grouped else {f"{up}.weight", f"{up}.bias"}
        elif layout == "btp":
            expected |= {f"{gate}.up.weight", f"{gate}.bias", f"{down}.down.weight"}
            expected |= set() if grouped else {f"{up}.up.weight", f"{up}.bias"}
        else:
            expected |= {f"{gate}.down.weight", f"{gate}.up.weight", f"{down}.down.weight", f"{down}.up.weight"}
            expected |= {"blocks.0.attention.q.down.weight", "blocks.0.attention.o.up.weight", "embedding.weight"}
        assert expected <= first.keys() == last.keys(), case
        assert not any(first.values()), (case, first)
        assert not any(last.values()), (case, last)
