"""AdamW: what it decays, and that it is torch's; gradient norm and clipping."""

from __future__ import annotations

import pytest
import torch

from boost.config import OptimizerSection, ParallelSection
from boost.parallel.mesh import Group, Mesh
from boost.parallel.sharding import described
from boost.training.clipping import clip_gradients, gradient_norm
from boost.training.optimizers.adamw import build_adamw
from tests.distributed.harness import run_ranks
from tests.models import build, load, loss_and_gradients, model_section, perturbed, tensors, tokens


@pytest.mark.parametrize("decay_norms", [False, True])
@pytest.mark.parametrize("linear", ["dense", "low_rank"])
def test_gains_and_biases_are_decayed_only_when_asked(linear: str, decay_norms: bool) -> None:
    model = build(model_section(linear=linear, attention_bias=True, mlp_bias=True))
    load(model, perturbed(tensors(model)))
    before = tensors(model)
    optimizer = build_adamw(model, OptimizerSection(lr=0.1, weight_decay=0.5, decay_norms=decay_norms))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in tensors(model).items():
        decayed = decay_norms or value.dim() > 1
        expected = before[name] * (1 - 0.1 * 0.5) if decayed else before[name]
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0, msg=name)


def test_steps_equal_the_formula() -> None:
    model = build(model_section())
    section = OptimizerSection(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    optimizer = build_adamw(model, section)
    reference = {name: value.clone() for name, value in tensors(model).items()}
    first = {name: torch.zeros_like(value) for name, value in reference.items()}
    second = {name: torch.zeros_like(value) for name, value in reference.items()}
    for step in range(1, 4):
        ids, labels = tokens(model.model, seed=step)
        _, gradients = loss_and_gradients(model, ids, labels)
        optimizer.step()
        for name, gradient in gradients.items():
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            if reference[name].dim() > 1:
                reference[name] *= 1 - 0.01 * 0.1
            direction = (first[name] / (1 - 0.8**step)) / ((second[name] / (1 - 0.9**step)).sqrt() + 1e-6)
            reference[name] -= 0.01 * direction
    for name, value in tensors(model).items():
        torch.testing.assert_close(value, reference[name], rtol=1e-9, atol=1e-12)


def _norm_and_clipped(mesh: Mesh, layout: str, linear: str) -> tuple[float, dict[str, torch.Tensor]]:
    parallel = ParallelSection(tp=mesh.tp.size, tensor_layout=layout)
    model = build(model_section(linear=linear, ffn_size=43, vocab_size=51, tie_embeddings=True), parallel, mesh.tp)
    loss_and_gradients(model, *tokens(model.model))
    norm = gradient_norm(model, mesh.tp)
    clip_gradients(model, norm, 0.01)
    return norm.item(), tensors(model, gradients=True)


@pytest.mark.parametrize(
    ("layout", "linear"),
    [("btp", "low_rank"), ("vanilla", "low_rank"), ("vanilla_sharded_heads", "low_rank"), ("btp", "dense")],
)
def test_norm_and_clipped_gradients_do_not_depend_on_tp(layout: str, linear: str) -> None:
    """Replicated parameters count once, shards are summed, on every rank alike."""
    norm, clipped = _norm_and_clipped(Mesh(), layout, linear)
    whole = torch.cat([value.flatten() for value in clipped.values()]).norm()
    assert whole.item() == pytest.approx(0.01, rel=1e-3), "clipping must be at work"
    for other_norm, other in run_ranks(2, _norm_and_clipped, layout, linear):
        assert other_norm == pytest.approx(norm, rel=1e-12)
        for name, value in other.items():
            torch.testing.assert_close(value, clipped[name], rtol=1e-9, atol=1e-15, msg=name)


def test_no_limit_leaves_gradients() -> None:
    model = build(model_section())
    _, before = loss_and_gradients(model, *tokens(model.model))
    clip_gradients(model, gradient_norm(model, Group()), None)
    after = tensors(model, gradients=True)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_every_parameter_is_in_one_group() -> None:
    model = build(model_section(attention_bias=True))
    optimizer = build_adamw(model, OptimizerSection())
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter, _ in described(model))
    assert len(set(grouped)) == len(grouped) == len(list(model.parameters()))
