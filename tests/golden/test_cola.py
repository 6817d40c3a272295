"""Our decoder computes what the published CoLA code computes: its golden files, reached by a chain of three links.

The files hold the published code's logits, loss and gradients with float64 weights, but that code computes RMSNorm,
the softmax of attention and the cross-entropy in fp32 whatever the dtype, so no float64 model can meet them closely.
The oracle below is the same arithmetic, written once more in plain torch, with the dtype of these three stages free:

a. with fp32 stages it is the golden file, to the last bit (fp32 sums depend on the width of the CPU's vectors and on
   the number of threads: with AVX512 and one thread, as when the file was made; elsewhere to fp32 rounding);
b. with fp64 stages it is our decoder in float64, to 1e-10;
c. and our decoder meets the file to the rounding of the published fp32 stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from boost.config import ModelSection, ParallelSection
from tests.models import build, distance, load, loss_and_gradients, worst

FOLDER = Path(__file__).parent
FILES = ["cola_latent_act", "cola_both_act"]


class Golden:
    """One golden file: its configuration, and its parameters and gradients under canonical names."""

    def __init__(self, file: str) -> None:
        with safe_open(FOLDER / f"{file}.safetensors", "pt") as stored:
            self.config: dict[str, Any] = json.loads(stored.metadata()["config"])
            self.values = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        self.ids, self.logits, self.loss = (self.values[name] for name in ("input_ids", "logits", "loss"))
        self.parameters, self.gradients = self.canonical("param."), self.canonical("grad.")

    def canonical(self, prefix: str) -> dict[str, Tensor]:
        """Factors are published as [in, r] and [r, out]; ours are [r, in] and [out, r]."""
        found = {name: value for name, value in self.values.items() if name.startswith(prefix)}
        return {
            canonical_name(name.removeprefix(prefix)): value.t() if "cola_" in name else value
            for name, value in found.items()
        }

    @property
    def silu_gate(self) -> bool:
        return not self.config["only_lr_act"]

    @property
    def labels(self) -> Tensor:
        """The next token; the last position has none."""
        labels = torch.full_like(self.ids, -100)
        labels[:, :-1] = self.ids[:, 1:]
        return labels

    @property
    def section(self) -> ModelSection:
        config = self.config
        return ModelSection(
            linear="low_rank",
            hidden_size=config["hidden_size"],
            ffn_size=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_size=config["head_dim"],
            vocab_size=config["vocab_size"],
            rank=config["rank"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=float(config["rope_theta"]),
            gate_activation="silu" if self.silu_gate else "none",
        )


def canonical_name(published: str) -> str:
    whole = {"model.embed_tokens.weight": "embedding.weight", "lm_head.weight": "head.weight"}
    if published in whole:
        return whole[published]
    name = published.removeprefix("model.").replace("layers.", "blocks.").replace("self_attn.", "attention.")
    name = name.replace("input_layernorm.", "attention.norm.").replace("post_attention_layernorm.", "mlp.norm.")
    return name.replace("_proj.", ".").replace("cola_a", "down.weight").replace("cola_b", "up.weight")


def oracle(golden: Golden, stage: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """CoLA in plain torch: logits, loss, gradients. `stage` is the dtype of norms, softmax and cross-entropy."""
    config, ids = golden.config, golden.ids
    p = {name: value.clone().requires_grad_() for name, value in golden.parameters.items()}
    (batch, sequence), heads, width = ids.shape, config["num_attention_heads"], config["head_dim"]

    def norm(x: Tensor, name: str) -> Tensor:
        wide = x.to(stage)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return p[f"{name}.weight"] * wide.to(x.dtype)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.silu(x @ p[f"{name}.down.weight"].t()) @ p[f"{name}.up.weight"].t()

    def rotate(x: Tensor) -> Tensor:
        turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], dim=-1)
        return x * cos + turned * sin

    frequencies = 1.0 / config["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    angles = torch.arange(sequence).float()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    cos, sin = angles.cos().double(), angles.sin().double()
    future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)

    x = p["embedding.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"blocks.{layer}.attention", f"blocks.{layer}.mlp"
        h = norm(x, f"{attention}.norm")
        q, k, v = (
            linear(h, f"{attention}.{name}").view(batch, sequence, heads, width).transpose(1, 2) for name in "qkv"
        )
        scores = rotate(q) @ rotate(k).transpose(-1, -2) * width**-0.5
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
        y = F.softmax(scores, dim=-1, dtype=stage).to(v.dtype) @ v
        x = x + linear(y.transpose(1, 2).reshape(batch, sequence, heads * width), f"{attention}.o")
        h = norm(x, f"{mlp}.norm")
        gate = linear(h, f"{mlp}.gate")
        x = x + linear((F.silu(gate) if golden.silu_gate else gate) * linear(h, f"{mlp}.up"), f"{mlp}.down")
    logits = norm(x, "norm") @ p["head.weight"].t()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).to(stage), ids[:, 1:].flatten())
    loss.backward()
    return logits.detach(), loss.detach(), {name: value.grad for name, value in p.items() if value.grad is not None}


def ours(golden: Golden, grouped: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Our decoder in float64: logits, loss, gradients."""
    decoder = build(golden.section, ParallelSection(group_linears=grouped))
    load(decoder, golden.parameters)
    return decoder(golden.ids).detach(), *loss_and_gradients(decoder, golden.ids, golden.labels)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=FILES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def test_oracle_with_fp32_stages_is_the_golden_file(golden: Golden, one_thread: None) -> None:
    """Link a: logits, loss and every gradient to 1e-12 with the vectors that made the file, else to fp32 rounding."""
    logits, loss, gradients = oracle(golden, torch.float32)
    exact = torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert distance(logits, golden.logits) <= (1e-12 if exact else 3e-7)
    assert distance(loss, golden.loss) <= (1e-12 if exact else 3e-7)
    error, name = worst(gradients, golden.gradients)
    assert error <= (1e-12 if exact else 3e-6), name


@pytest.mark.parametrize("grouped", [True, False])
def test_decoder_is_the_oracle_with_fp64_stages(golden: Golden, grouped: bool) -> None:
    """Link b: logits, loss and every gradient to 1e-10."""
    logits, loss, gradients = ours(golden, grouped)
    expected_logits, expected_loss, expected_gradients = oracle(golden, torch.float64)
    assert distance(logits, expected_logits) <= 1e-10
    assert distance(loss, expected_loss) <= 1e-10
    error, name = worst(gradients, expected_gradients)
    assert error <= 1e-10, name


@pytest.mark.parametrize("grouped", [True, False])
def test_decoder_meets_the_golden_file_to_the_rounding_of_its_fp32_stages(golden: Golden, grouped: bool) -> None:
    """Link c: logits, loss and every gradient to 3e-6."""
    logits, loss, gradients = ours(golden, grouped)
    assert distance(logits, golden.logits) <= 3e-6
    assert distance(loss, golden.loss) <= 3e-6
    error, name = worst(gradients, golden.gradients)
    assert error <= 3e-6, name


def test_files_tell_the_two_mlps_apart() -> None:
    """The gate's activation matters: neither file could be met by the other's model."""
    one, other = (Golden(file) for file in FILES)
    assert {one.silu_gate, other.silu_gate} == {False, True}
    one.config["only_lr_act"] = not one.config["only_lr_act"]
    assert distance(oracle(one, torch.float32)[0], one.logits) > 1e-4
