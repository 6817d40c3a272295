"""A model's parameters, and tensors held beside them, to and from checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import yaml
from torch import Tensor, nn

from boost.checkpoint.slices import Slice
from boost.checkpoint.store import Checkpoint
from boost.config import TrainConfig
from boost.errors import UserError
from boost.parallel.mesh import Group
from boost.parallel.sharding import described

PARAMETER = "parameter"


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


def saved_config(checkpoint: Checkpoint) -> TrainConfig:
    """The configuration a checkpoint was trained with."""
    return TrainConfig.from_dict(yaml.safe_load(checkpoint.read_file("config.yaml")))
