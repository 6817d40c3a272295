"""LaX crossings: the decoder against plain torch, layouts against one process, recomputation, and collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config import ModelSection, ParallelSection
from boost.model.decoder import Decoder
from boost.parallel.collectives import count_collectives
from boost.parallel.mesh import Mesh
from boost.parallel.overlap import WeightGradQueue
from tests.distributed.harness import run_ranks
from tests.distributed.test_recompute import D, R, kept_per_token_and_block
from tests.models import build, distance, load, loss_and_gradients, model_section, perturbed, tensors, tokens, worst
from tests.oracle import plain_loss

TOLERANCE = 1e-10
GATES = ["identity", "diagonal", "dense", "tensor"]
LAYERS = 3


def section(gate: str, number: int) -> ModelSection:
    """Three layers, padded MLP and vocabulary, rank 6 (H is 2 x 3); GQA, ties, biases and activation alternate."""
    odd = number % 2 == 1
    return model_section(
        crossing=gate,
        layers=LAYERS,
        heads=8,
        kv_heads=4 if odd else 8,
        ffn_size=43,
        vocab_size=51,
        tie_embeddings=odd,
        attention_bias=odd,
        mlp_bias=not odd,
        bottleneck_activation="silu" if number < 2 else "none",
    )


# Gate by gate, grouped and ungrouped, with each set of the other options once.
CASES = [
    (gate, (number + shift) % 4, grouped)
    for number, gate in enumerate(GATES)
    for shift, grouped in ((0, True), (1, False))
]


def weights_of(model: ModelSection) -> dict[str, Tensor]:
    return perturbed(tensors(build(model)))


def oracle(model: ModelSection, weights: dict[str, Tensor], ids: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    """The same decoder in plain torch: mean loss and gradients."""
    p = {name: value.clone().requires_grad_() for name, value in weights.items()}
    rank = model.rank or 0
    rows = max(a for a in range(1, rank + 1) if rank % a == 0 and a * a <= rank)
    latents: dict[str, Tensor] = {}  # of the block before, by linear

    def gate(h: Tensor, prefix: str) -> Tensor:
        if model.crossing == "identity":
            return h
        if model.crossing == "diagonal":
            return h * p[f"{prefix}.weight"]
        if model.crossing == "dense":
            return F.linear(h, p[f"{prefix}.weight"], p[f"{prefix}.bias"])
        left, right = p[f"{prefix}.left.weight"], p[f"{prefix}.right.weight"]
        return (left.t() @ h.unflatten(-1, (rows, -1)) @ right).flatten(-2)

    def linear(x: Tensor, layer: int, name: str) -> Tensor:
        prefix = f"blocks.{layer}.{name}"
        u = F.linear(x, p[f"{prefix}.down.weight"])
        if layer > 0:
            u = u + gate(latents[name], f"{prefix}.crossing")
            u = F.layer_norm(u, (rank,), p[f"{prefix}.crossing.norm.weight"], p[f"{prefix}.crossing.norm.bias"], 1e-6)
        latents[name] = F.silu(u) if model.bottleneck_activation == "silu" else u
        return F.linear(latents[name], p[f"{prefix}.up.weight"], p.get(f"{prefix}.bias"))

    loss = plain_loss(model, p, ids, labels, linear)
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in p.items()}


@pytest.mark.parametrize(("gate", "number", "grouped"), CASES)
def test_decoder_is_plain_torch(gate: str, number: int, grouped: bool) -> None:
    model = section(gate, number)
    weights = weights_of(model)
    ids, labels = tokens(model)
    decoder = build(model, ParallelSection(group_linears=grouped))
    load(decoder, weights)
    loss, gradients = loss_and_gradients(decoder, ids, labels)
    expected_loss, expected = oracle(model, weights, ids, labels)
    assert distance(loss, expected_loss) <= TOLERANCE
    error, name = worst(gradients, expected)
    assert error <= TOLERANCE, name


def run(
    mesh: Mesh, model: ModelSection, weights: dict[str, Tensor], options: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Loss, gradients, collectives forward and backward."""
    decoder = Decoder(model, ParallelSection(tp=mesh.tp.size, **options), mesh.tp, dtype=torch.float64, seed=1, **more)
    load(decoder, weights)
    ids, labels = tokens(model)
    with count_collectives() as forward:
        loss = decoder.loss(ids, labels, samples=range(len(ids))) / (labels != -100).sum()
    with count_collectives() as backward:
        loss.backward()
        if decoder.queue is not None:
            decoder.queue.flush()
    replicated = [p.grad for m in decoder.modules() if "crossing" in type(m).__module__ for p in m.parameters()]
    return {
        "loss": loss.detach(),
        "gradients": tensors(decoder, gradients=True),
        "forward": list(forward),
        "backward": list(backward),
        "replicated": replicated,
    }


def options_of(number: int, grouped: bool) -> dict[str, Any]:
    return {"group_linears": grouped, "norm": "sync" if number == 3 else "online"}


def compare(mesh: Mesh) -> list[dict[str, Any]]:
    """Every case against one process, and what it sends against the model without a crossing."""
    out = []
    for gate, number, grouped in CASES:
        model = section(gate, number)
        weights = weights_of(model)
        single = run(Mesh(), model, weights, {"group_linears": False})
        found = run(mesh, model, weights, options_of(number, grouped))
        plain = run(mesh, model.model_copy(update={"crossing": "none"}), weights, options_of(number, grouped))
        error, name = worst(found["gradients"], single["gradients"])
        out.append(
            {
                "case": (gate, number, grouped, name),
                "error": max(error, distance(found["loss"], single["loss"])),
                "forward": (found["forward"], plain["forward"]),
                "backward": (found["backward"], plain["backward"]),
                "replicated": found["replicated"],
            }
        )
    return out


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layouts_equal_one_process_and_send_what_they_did(tp: int) -> None:
    """Loss and every gradient to 1e-10, the same collectives forward and backward as without a crossing, and the
    same gradients of gates and norms on every rank."""
    results = [compare(Mesh())] if tp == 1 else run_ranks(tp, compare)
    for result in results:
        assert len(result) == len(CASES)
        for outcome, first in zip(result, results[0], strict=True):
            assert outcome["error"] <= TOLERANCE, (outcome["case"], outcome["error"])
            for way in ("forward", "backward"):
                found, plain = outcome[way]
                assert found == plain
                assert tp == 1 or len(found) >= 4 * LAYERS
            assert len(outcome["replicated"]) > 0
            assert all(map(torch.equal, outcome["replicated"], first["replicated"])), outcome["case"]


def recompute(mesh: Mesh) -> list[tuple[Any, bool, int]]:
    """With each gate and recomputation: whether every gradient is the same, and the collectives repeated."""
    out = []
    for gate, number, grouped in CASES[::2] + CASES[1:2]:
        model = section(gate, number)
        weights = weights_of(model)
        kept = run(mesh, model, weights, {"group_linears": grouped})
        for kind, queue in (("latent", None), ("latent", WeightGradQueue()), ("block", None)):
            again = run(mesh, model, weights, {"group_linears": grouped}, recompute=kind, queue=queue)
            same = all(torch.equal(again["gradients"][n], kept["gradients"][n]) for n in kept["gradients"])
            out.append(((gate, grouped, kind), same, len(again["backward"]) - len(kept["backward"])))
    return out


def test_recomputed_gradients_are_identical() -> None:
    """Latents repeat no collective, whole blocks repeat their forward ones: four, or seven ungrouped."""
    for result in run_ranks(2, recompute):
        for (gate, grouped, kind), same, repeated in result:
            assert same, (gate, grouped, kind)
            assert repeated == (0 if kind == "latent" else LAYERS * (4 if grouped else 7)), (gate, grouped, kind)


@pytest.mark.parametrize("gate", ["identity", "tensor"])
def test_latent_recomputation_keeps_what_goes_into_the_norm(gate: str) -> None:
    """Beside what a model without crossings keeps, 12 r: v at seven linears and z at the five behind an online norm."""
    for mine in run_ranks(2, kept_per_token_and_block, "latent", torch.float32, gate):
        assert mine <= (12 * R + D // 2) * 4 + 4 * 4


def test_what_a_group_of_linears_starts_from() -> None:
    """Norms and diagonal gates at the identity, dense ones normal(0.02) without bias, tensor ones kaiming-uniform."""
    for gate in GATES:
        model = model_section(crossing=gate, rank=96, layers=3)
        found = {n: v for n, v in tensors(build(model, dtype=torch.float32)).items() if ".crossing." in n}
        assert not any(name.startswith("blocks.0.") for name in found)
        for name, value in found.items():
            kind = name.split(".crossing.")[1]
            if kind in ("norm.weight", "norm.bias", "bias") or gate == "diagonal":
                assert torch.equal(value, torch.full_like(value, float(not kind.endswith("bias")))), name
            elif gate == "dense":
                assert float(value.std()) == pytest.approx(0.02, rel=0.05), name
            else:
                size = {"left.weight": 8, "right.weight": 12}[kind]
                bound = (6 / size) ** 0.5
                assert value.shape == (size, size)
                assert 0.8 * bound < float(value.abs().max()) <= bound
        assert len(found) == 2 * 7 * (2 + {"identity": 0, "diagonal": 1, "dense": 2, "tensor": 2}[gate])
