"""Our crossings compute what LaX's published code computes: its golden file, three pairs in a row.

There x <- x + linear(x, latent of the linear before); outputs, latents and every gradient are equal to 1e-10.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from boost.config import ModelSection
from boost.kernels.activation import ACTIVATIONS
from boost.model.crossing import Crossing
from boost.model.low_rank import Linear
from boost.parallel.sharding import described
from tests.models import distance, model_section, worst

NAMES = {"norm.weight": "norm.weight", "norm.bias": "norm.bias", "gate.weight": "weight", "gate.bias": "bias"}
NAMES |= {"gate.D": "left.weight", "gate.E": "right.weight"}


class Golden:
    """One gate and activation of the file."""

    def __init__(self, gate: str, act: str) -> None:
        prefix = f"{gate}.{act}."
        with safe_open(Path(__file__).parent / "lax_chain.safetensors", "pt") as stored:
            self.config: dict[str, Any] = {
                name: json.loads(value) for name, value in stored.metadata().items() if name != "gate shape"
            }
            self.values = {
                name.removeprefix(prefix): stored.get_tensor(name)
                for name in stored.keys()  # noqa: SIM118
                if name.startswith(prefix)
            }

    def layer(self, kind: str, layer: int) -> dict[str, Tensor]:
        prefix = f"{kind}.{layer}."
        found = {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}
        return {NAMES.get(name, name): value for name, value in found.items()}


def crossing_parameters(crossings: list[Crossing]) -> dict[str, torch.nn.Parameter]:
    """Canonical name to parameter; each holds the share of one linear."""
    return {part.name: parameter for one in crossings for parameter, (part,) in described(one)}


@pytest.mark.parametrize("act", ["silu", "none"])
@pytest.mark.parametrize("gate", ["identity", "dense", "tensor"])
def test_chain_is_the_published_one(gate: str, act: str) -> None:
    golden = Golden(gate, act)
    layers, rank, d = (golden.config[name] for name in ("layers", "r", "d"))
    model: ModelSection = model_section(rank=rank, layers=layers, crossing=gate, bottleneck_activation=act)
    linears = [Linear(f"blocks.{layer}.m", d, d) for layer in range(layers)]
    crossings = [
        Crossing(model, [linear], linears[layer + 1 : layer + 2], ACTIVATIONS[act], torch.float64, first=layer == 0)
        for layer, linear in enumerate(linears)
    ]
    ours = crossing_parameters(crossings)
    factors: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {"input": golden.values["grad.input"]}
    for layer in range(layers):
        for name, value in golden.layer("param", layer).items():
            if name in "AB":
                factors[f"{layer}.{name}"] = value.clone().requires_grad_()
            else:
                ours[f"blocks.{layer}.m.crossing.{name}"].data.copy_(value)
        for name, value in golden.layer("grad", layer).items():
            expected[f"{layer}.{name}" if name in "AB" else f"blocks.{layer}.m.crossing.{name}"] = value
    x = start = golden.values["input"].clone().requires_grad_()
    tap = None
    for layer, crossing in enumerate(crossings):
        z = x @ factors[f"{layer}.A"]
        h, tap = crossing(z if tap is None else z + tap)
        assert distance(h.detach(), golden.values[f"latent.{layer}"]) <= 1e-10
        x = x + h @ factors[f"{layer}.B"]
    assert tap is None
    loss = (x * torch.linspace(-1, 1, d, dtype=x.dtype)).square().mean()
    loss.backward()
    assert distance(x.detach(), golden.values["output"]) <= 1e-10
    assert distance(loss.detach(), golden.values["loss"][0]) <= 1e-10
    everything = {**factors, **ours, "input": start}
    gradients = {name: value.grad for name, value in everything.items() if value.grad is not None}
    assert gradients.keys() == everything.keys()
    error, name = worst(gradients, expected)
    assert error <= 1e-10, name
