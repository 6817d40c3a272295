"""`overlap: split_batch`: the same loss and gradients, the same traffic, and bridges that are really under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from boost.config import ParallelSection
from boost.model.decoder import Decoder
from boost.parallel import interleave
from boost.parallel.bridge import Bridge
from boost.parallel.collectives import count_collectives
from boost.parallel.mesh import Mesh
from boost.parallel.sharding import initialize
from tests.distributed.harness import run_ranks
from tests.models import distance, model_section, tensors, tokens


def step(mesh: Mesh, overlap: str, batch: int, recompute: Any, fields: dict[str, Any]) -> dict[str, Any]:
    model = model_section(layers=3, dropout=0.1, **fields)
    decoder = Decoder(
        model, ParallelSection(tp=mesh.tp.size, overlap=overlap), mesh.tp, dtype=torch.float64, recompute=recompute
    )
    initialize(decoder, 1, mesh.tp)
    ids, labels = tokens(model, batch=batch)
    with count_collectives() as forward:
        loss = decoder.loss(ids, labels, samples=range(batch))
    with count_collectives() as backward:
        loss.backward()
    return {
        "loss": loss.detach(),
        "gradients": tensors(decoder, gradients=True),
        "forward": [(c.name, c.elements) for c in forward],
        "backward": [(c.name, c.elements) for c in backward],
    }


@pytest.mark.parametrize("recompute", ["none", "latent"])
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("fields", [{}, {"kv_heads": 2, "tie_embeddings": True, "attention_bias": True}], ids=str)
def test_halves_equal_the_whole(batch: int, recompute: str, fields: dict[str, Any]) -> None:
    """Also where the batch is odd, with GQA, tied embeddings, biases, dropout and latent recomputation."""
    reference = run_ranks(2, step, "none", batch, "none", fields)
    for mine, other in zip(run_ranks(2, step, "split_batch", batch, recompute, fields), reference, strict=True):
        assert distance(mine["loss"], other["loss"]) < 1e-12
        for name, gradient in other["gradients"].items():
            assert distance(mine["gradients"][name], gradient) < 1e-12, name
        for way in ("forward", "backward"):
            # Twice the bridges, each of half the tokens: the same elements in all.
            assert sum(n for _, n in mine[way]) == sum(n for _, n in other[way])
            bridges = 3 * 4
            assert len(mine[way]) == len(other[way]) + bridges


def _events(mesh: Mesh) -> list[str]:
    """The order in which bridges start and finish and gradient sums start, in one forward and backward pass."""
    events: list[str] = []

    def record(name: str, function: Any) -> Any:
        def run(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bridge, "start", record("start", Bridge.start))
        patch.setattr(Bridge, "finish", record("finish", Bridge.finish))
        patch.setattr(interleave, "start_all_reduce", record("sum", interleave.start_all_reduce))
        step(mesh, "split_batch", 2, "none", {})
    return events


def test_a_bridge_is_under_way_while_the_other_half_computes() -> None:
    """Each half's bridge finishes only after the other half's has started."""
    events = run_ranks(2, _events)[0]
    bridges = 3 * 4 * 2
    assert events[: 2 * bridges] == ["start", "start"] + ["finish", "start"] * (bridges - 2) + ["finish", "finish"]
    assert events[2 * bridges :] == ["sum"] * bridges
