"""Recomputation: the same gradients to the bit, no collective repeated, and no more kept than promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from boost.bench.memory import track_storages
from boost.config import ParallelSection
from boost.model.decoder import Decoder
from boost.parallel.collectives import Collective, count_collectives
from boost.parallel.mesh import Mesh
from boost.parallel.overlap import WeightGradQueue
from boost.parallel.sharding import initialize
from tests.distributed.harness import run_ranks
from tests.models import distance, model_section, tensors, tokens

R, D, F = 10, 32, 48


def decoder(
    mesh: Mesh,
    layout: str,
    dtype: torch.dtype,
    layers: int = 2,
    queue: bool = False,
    crossing: str = "none",
    **options: Any,
) -> Decoder:
    linear = layout if layout in ("dense", "relora") else "low_rank"
    rank = {} if linear == "dense" else {"rank": R}
    more = {"lora_dropout": 0.2} if linear == "relora" else {}
    sizes = {"layers": layers, "hidden_size": D, "ffn_size": F, "head_size": 8, **rank}
    model = model_section(linear=linear, dropout=0.1, crossing=crossing, **sizes, **more)
    parallel = ParallelSection(tp=mesh.tp.size, tensor_layout=layout if linear == "low_rank" else "btp")
    out = Decoder(model, parallel, mesh.tp, dtype=dtype, seed=1, queue=WeightGradQueue() if queue else None, **options)
    initialize(out, 1, mesh.tp)
    return out


def step(model: Decoder) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[Collective]]:
    """Loss, canonical gradients, and the collectives of backward."""
    ids, labels = tokens(model.model)
    loss = model.loss(ids, labels, samples=[5, 6, 7])
    assert not any(parameter.grad is not None for parameter in model.parameters())
    with count_collectives() as seen:
        loss.backward()
        if model.queue is not None:
            model.queue.flush()
    assert not any(parameter.grad.requires_grad for parameter in model.parameters() if parameter.grad is not None)
    return loss.detach(), tensors(model, gradients=True), list(seen)


def compare(mesh: Mesh, layout: str, recompute: str, dtype: torch.dtype, queue: bool) -> dict[str, Any]:
    plain_loss, plain, plain_seen = step(decoder(mesh, layout, dtype))
    loss, gradients, seen = step(decoder(mesh, layout, dtype, recompute=recompute, queue=queue))
    return {
        "equal": torch.equal(loss, plain_loss) and all(torch.equal(gradients[n], plain[n]) for n in plain),
        "error": max(distance(gradients[n], plain[n]) for n in plain),
        "calls": len(seen) - len(plain_seen),
        "elements": sum(c.all_reduced_elements for c in seen) - sum(c.all_reduced_elements for c in plain_seen),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queue", [False, True], ids=["now", "queued"])
@pytest.mark.parametrize("recompute", ["none", "latent", "block"])
def test_btp_gradients_are_identical(recompute: str, queue: bool, dtype: torch.dtype) -> None:
    """With dropout; latent recomputation repeats no collective, whole blocks repeat their 4 forward ones."""
    for result in run_ranks(2, compare, "btp", recompute, dtype, queue):
        assert result["equal"], result
        assert result["calls"] == (2 * 4 if recompute == "block" else 0)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ("vanilla", "latent"),
        ("vanilla", "block"),
        ("vanilla_sharded_heads", "latent"),
        ("vanilla_sharded_heads", "block"),
        ("dense", "block"),
        ("relora", "block"),
    ],
)
def test_baselines_recompute_too(layout: str, recompute: str) -> None:
    """Latent recomputation repeats wide all-reduces under vanilla; whole blocks stop before their last one."""
    for result in run_ranks(2, compare, layout, recompute, torch.float64, False):
        assert result["equal"], result
        assert result["calls"] > 0
        if layout == "vanilla" and recompute == "latent":
            # Per block and token: q, k, v, o, gate, up; down's output is not needed again.
            assert result["elements"] == 2 * 33 * (4 * D + 2 * F)


def kept(mesh: Mesh, layers: int, recompute: str, dtype: torch.dtype, crossing: str, layout: str, train: bool) -> int:
    model = decoder(mesh, layout, dtype, layers, crossing=crossing, recompute=recompute).train(train)
    ids, labels = tokens(model.model, batch=4, sequence=64)
    with track_storages() as tracker:
        loss = model.loss(ids, labels, samples=range(4))
    assert loss.requires_grad
    return tracker.live_bytes(excluding=model.parameters())


def kept_per_token_and_block(
    mesh: Mesh, recompute: str, dtype: torch.dtype, crossing: str = "none", layout: str = "btp", train: bool = False
) -> float:
    more, fewer = (kept(mesh, layers, recompute, dtype, crossing, layout, train) for layers in (5, 3))
    return (more - fewer) / 2 / 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latent_recomputation_keeps_latents_and_the_residual_shard(dtype: torch.dtype) -> None:
    """At most 7 r + d / tp elements per token and block, and a few fp32 scalars."""
    size = torch.empty((), dtype=dtype).element_size()
    for mine in run_ranks(2, kept_per_token_and_block, "latent", dtype):
        scalars = 4 * 4  # |x| and 1/rms, of two norms
        assert 7 * R * size < mine <= (7 * R + D // 2) * size + scalars
    for mine in run_ranks(2, kept_per_token_and_block, "block", dtype):
        assert mine == D // 2 * size
    for mine in run_ranks(2, kept_per_token_and_block, "none", dtype):
        assert mine > 2 * (7 * R + D) * size


@pytest.mark.parametrize("layout", ["btp", "relora"])
def test_recomputed_blocks_keep_no_dropout_mask(layout: str) -> None:
    """A block's input in training as well, where ReLoRA drops what its factors read too."""
    for mine in run_ranks(2, kept_per_token_and_block, "block", torch.float32, "none", layout, True):
        assert mine == (D // 2 if layout == "btp" else D) * 4
