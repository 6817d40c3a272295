"""A model's parameters, and tensors held beside them, to and from checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from boost.checkpoint.slices import Slice
from boost.checkpoint.store import Checkpoint
from boost.config import ModelSection, TrainConfig
from boost.config_loader import parse_mapping
from boost.errors import UserError
from boost.model.low_rank import Linear
from boost.model.sparse import Supports, check_support, values_name
from boost.parallel.mesh import Group
from boost.parallel.sharding import described

PARAMETER = "parameter"
CONFIG = "config.yaml"
SUPPORT = "support"  # the positions that the values of a sparse matrix have in it


def parameter_slices(
    model: nn.Module,
    tp: Group,
    beside: Callable[[nn.Parameter], Mapping[str, Tensor]] = lambda parameter: {},
    *,
    owned: bool = False,
) -> Iterator[Slice]:
    """This rank's share of every canonical tensor.

    Args:
        beside: further tensors of a parameter's shape by kind, such as an optimiser's moments.
        owned: leave out what another rank holds as well and writes.
    """
    for parameter, parts in described(model):
        held = {PARAMETER: parameter.detach(), **beside(parameter)}
        for part in parts:
            if owned and not part.mine(tp):
                continue
            offsets = part.offsets(parameter, tp)
            for kind, tensor in held.items():
                yield Slice(part.name, kind, part.shape, offsets, part.view(tensor, tp))


def support_slices(model: nn.Module, tp: Group, *, owned: bool = False) -> Iterator[Slice]:
    """This rank's share of every sparse matrix's positions, beside its values and of the same name.

    Args:
        owned: as for `parameter_slices`.
    """
    for parameter, parts in described(model):
        for part in parts:
            if part.support is None or (owned and not part.mine(tp)):
                continue
            offsets, held = part.offsets(parameter, tp), part.view(parameter, tp)
            positions = part.support.positions.narrow(0, offsets[0] - part.support.start, len(held))
            yield Slice(part.name, SUPPORT, part.shape, offsets, positions)


def check_supports(checkpoint: Checkpoint, model: nn.Module, tp: Group) -> None:
    """Compares the model's supports with those that a checkpoint's values stand for.

    Raises:
        UserError: they differ, or one is missing.
    """
    for mine in support_slices(model, tp):
        # In the widest type: another program may have saved them so.
        theirs = replace(mine, tensor=torch.empty_like(mine.tensor, dtype=torch.int64))
        checkpoint.load([theirs], cast=True)
        if not torch.equal(mine.tensor.long(), theirs.tensor):
            raise UserError(str(checkpoint.path), f"{SUPPORT} {mine.name} is not that of the model")


def saved_supports(checkpoint: Checkpoint, model: ModelSection) -> Supports:
    """The supports that a checkpoint's values stand for, whoever drew them.

    Raises:
        UserError: when called: there is none for the linear, or it does not fit the model.
    """

    def read(linear: Linear) -> Tensor:
        with torch.device("cpu"):  # models are built under other defaults
            positions = checkpoint.tensor(values_name(linear), SUPPORT)
        try:
            check_support(model, linear, positions)
        except ValueError as error:
            raise UserError(str(checkpoint.path), f"{SUPPORT} {values_name(linear)} {error}") from None
        return positions

    return read


def load_weights(
    checkpoint: Checkpoint,
    model: nn.Module,
    tp: Group,
    *,
    cast: bool = False,
    whole: nn.Module | None = None,
    fresh: Collection[str] = (),
) -> None:
    """Fills the model's parameters from a checkpoint of any layout.

    Args:
        whole: where the model is some stages of a pipeline, the one that they are stages of, on any device.
        fresh: names of tensors that stay as they are, and that the checkpoint must not have.

    Raises:
        UserError: a tensor is missing, left over, of another shape, or of another type without `cast`.
    """
    targets = [share for share in parameter_slices(model, tp) if share.name not in fresh]
    known = targets if whole is None else parameter_slices(whole, Group())
    extra = checkpoint.unused((share for share in known if share.name not in fresh), kinds=[PARAMETER])
    if extra:
        raise UserError(
            str(checkpoint.path),
            f"the model has no parameter {extra[0]}",
            hint="use the checkpoint's own model section",
        )
    checkpoint.load(targets, cast=cast)
    check_supports(checkpoint, model, tp)


def saved_config(checkpoint: Checkpoint) -> TrainConfig:
    """The configuration a checkpoint was trained with.

    Raises:
        UserError: naming the checkpoint's file: absent, damaged, or not a configuration.
    """
    where = str(checkpoint.path / CONFIG)
    return TrainConfig.from_dict(parse_mapping(checkpoint.read_file(CONFIG), where), where)
