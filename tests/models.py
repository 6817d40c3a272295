"""Small models for tests, their canonical tensors, and how far two sets of gradients are apart."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from boost.config import ModelSection, ParallelSection
from boost.model.decoder import Decoder
from boost.parallel.data_parallel import sum_gradients
from boost.parallel.mesh import Group
from boost.parallel.sharding import described, initialize, partial_parameters

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "ffn_size": 44,
    "layers": 2,
    "heads": 4,
    "head_size": 6,
    "vocab_size": 50,
    "init_std": 0.3,
}


def model_section(**changes: Any) -> ModelSection:
    """A small model; rank 6 unless dense."""
    fields = {**SMALL, **changes}
    if fields.get("linear", "low_rank") != "dense":
        fields.setdefault("rank", 6)
    return ModelSection(**fields)


def build(
    model: ModelSection,
    parallel: ParallelSection | None = None,
    tp: Group | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 1,
) -> Decoder:
    """A model initialised from the seed, its gains and biases perturbed so that they matter."""
    decoder = Decoder(model, parallel or ParallelSection(), tp or Group(), dtype=dtype, seed=seed)
    initialize(decoder, seed, tp or Group())
    return decoder


def tensors(
    decoder: nn.Module, *, gradients: bool = False, tp: Group | None = None, shards: Group | None = None
) -> dict[str, Tensor]:
    """Whole canonical parameters, or their gradients, of what these groups hold, on every rank of them.

    A rank's own share is its own.
    """
    tp = tp or cast(Decoder, decoder).tp
    mine: list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]] = []
    for parameter, parts in described(decoder):
        if gradients and not parameter.requires_grad:
            continue
        held = parameter.grad if gradients else parameter
        assert held is not None, parts
        for part in parts:
            share = part.view(held.detach(), tp).clone()
            mine.append((part.name, part.shape, part.offsets(held, tp), share))
    pieces = mine
    for group in (shards or Group(), tp):
        if group.size > 1:
            gathered: list[Any] = [None] * group.size
            dist.all_gather_object(gathered, pieces, group=group.process_group)
            pieces = [piece for others in gathered for piece in others]
    whole: dict[str, Tensor] = {}
    for name, shape, offsets, share in pieces + mine:
        tensor = whole.setdefault(name, torch.full(shape, torch.nan, dtype=share.dtype))
        tensor[tuple(slice(o, o + n) for o, n in zip(offsets, share.shape, strict=True))] = share
    assert not any(tensor.isnan().any() for tensor in whole.values()), "shares leave gaps"
    return whole


@torch.no_grad()
def load(decoder: nn.Module, whole: dict[str, Tensor], tp: Group | None = None) -> None:
    """Fills a model of any layout, or some stages of one, from whole canonical tensors."""
    tp = tp or cast(Decoder, decoder).tp
    for parameter, parts in described(decoder):
        parameter.zero_()
        for part in parts:
            share = part.view(parameter, tp)
            offsets = part.offsets(parameter, tp)
            box = tuple(slice(o, o + n) for o, n in zip(offsets, share.shape, strict=True))
            share.copy_(whole[part.name][box])


def perturbed(whole: dict[str, Tensor], seed: int = 7) -> dict[str, Tensor]:
    """The same tensors with gains away from one, and biases, and ReLoRA's B, away from zero."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + 0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        if value.dim() == 1 or not value.any()
        else value.clone()
        for name, value in sorted(whole.items())
    }


def tokens(model: ModelSection, batch: int = 3, sequence: int = 11, seed: int = 3) -> tuple[Tensor, Tensor]:
    """ids and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.vocab_size, (batch, sequence + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, ::3] = -100
    return ids[:, :-1], labels


def loss_and_gradients(decoder: Decoder, ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss over the labels that count, and every canonical gradient."""
    decoder.zero_grad()
    loss = decoder.loss(ids, labels, samples=range(len(ids))) / (labels != -100).sum()
    loss.backward()
    sum_gradients(partial_parameters(decoder), decoder.tp)
    return loss.detach(), tensors(decoder, gradients=True)


def distance(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| in norm; a zero reference must be met exactly.

    Infinite, and never NaN, which `max` may pass by, where one of them is not finite.
    """
    scale = reference.double().norm()
    difference = (value.double() - reference.double()).norm()
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    relative = float(difference / scale)
    return math.inf if math.isnan(relative) else relative


def worst(values: dict[str, Tensor], references: dict[str, Tensor]) -> tuple[float, str]:
    """The largest distance and where it is."""
    assert values.keys() == references.keys(), values.keys() ^ references.keys()
    return max((distance(values[name], references[name]), name) for name in references)
