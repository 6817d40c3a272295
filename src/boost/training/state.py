"""Training state to and from checkpoints: which tensors, and what may change between saving and resuming."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from boost.checkpoint.slices import Slice
from boost.checkpoint.store import Checkpoint, save
from boost.config import TrainConfig
from boost.errors import UserError
from boost.parallel.collectives import barrier
from boost.parallel.mesh import Group, Mesh
from boost.parallel.sharding import described
from boost.training.optimizers.adamw import MOMENTS

logger = logging.getLogger("boost")

# What a resumed run must have in common with the saved one. The rest may change, and is logged when it does.
FIXED = {
    "model": None,
    "optimizer": ("name",),
    "train": ("sequence_length", "global_batch_size"),
    "data": ("seed",),
}
FREE_MODEL_FIELDS = ("dropout",)
UNLOGGED = ("run", "logging")


def parameter_slices(model: nn.Module, tp: Group, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Slice]:
    """This rank's share of every canonical tensor: parameters, and moments where an optimiser is given."""
    for parameter, parts in described(model):
        held = {"parameter": parameter.detach()}
        if optimizer is not None:
            held |= {moment: optimizer.state[parameter][moment] for moment in MOMENTS}
        for part in parts:
            offsets = part.offsets(parameter, tp)
            for kind, tensor in held.items():
                yield Slice(part.name, kind, part.shape, offsets, part.view(tensor, tp))


def owned_slices(model: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer) -> Iterator[Slice]:
    """The slices that this rank writes: replicas, over dp and of unsharded tensors over tp, are written once."""
    if mesh.dp.rank > 0:
        return
    sharded = {part.name for _, parts in described(model) for part in parts if part.split is not None}
    for piece in parameter_slices(model, mesh.tp, optimizer):
        if piece.name in sharded or mesh.tp.rank == 0:
            yield piece


def save_state(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    mesh: Mesh,
    fingerprint: str,
    tokenizer: bytes,
) -> Path:
    """Writes `root/step-{step}` from all ranks."""
    state = {"step": step, "optimizer_steps": step, "data_fingerprint": fingerprint}
    return save(
        root,
        step,
        owned_slices(model, mesh, optimizer),
        state,
        files={"config.yaml": config.to_yaml().encode(), "tokenizer.json": tokenizer},
        rank=mesh.world.rank,
        world=mesh.world.size,
        barrier=lambda: barrier(mesh.world),
        keep=config.checkpoint.keep,
    )


def load_weights(checkpoint: Checkpoint, model: nn.Module, tp: Group, *, cast: bool = False) -> None:
    """Fills the model's parameters.

    Raises:
        UserError: a tensor is missing, left over, or of another shape.
    """
    targets = list(parameter_slices(model, tp))
    extra = checkpoint.unused(targets, kinds=["parameter"])
    if extra:
        raise UserError(
            str(checkpoint.path),
            f"the model has no parameter {extra[0]}",
            hint="use the checkpoint's own model section",
        )
    checkpoint.load(targets, cast=cast)


def load_state(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, tp: Group) -> int:
    """Fills parameters and optimiser state, and returns the number of steps taken."""
    load_weights(checkpoint, model, tp)
    checkpoint.load(parameter_slices(model, tp, optimizer))
    for state in optimizer.state.values():
        state["step"].fill_(checkpoint.state["optimizer_steps"])
    return checkpoint.step


def saved_config(checkpoint: Checkpoint) -> TrainConfig:
    """The configuration a checkpoint was trained with."""
    content = yaml.safe_load(checkpoint.read_file("config.yaml"))
    return TrainConfig.from_dict(content)


def check_resumable(checkpoint: Checkpoint, config: TrainConfig, fingerprint: str) -> None:
    """Compares a run with the checkpoint that it would go on from.

    Raises:
        UserError: the first field that differs and may not.
    """
    before, now = saved_config(checkpoint).model_dump(), config.model_dump()
    for section, fields in now.items():
        for name, value in fields.items():
            old, field = before[section][name], f"{section}.{name}"
            if old == value or section in UNLOGGED:
                continue
            names = FIXED.get(section, ())
            fixed = name not in FREE_MODEL_FIELDS if names is None else name in names
            if fixed or _changes_masters(field, old, value):
                raise UserError(
                    field,
                    f"differs from the checkpoint {checkpoint.path}",
                    expected=old,
                    got=value,
                    hint="restore the value, or start a fresh run in another run.dir (run.init_from takes weights)",
                )
            logger.info("resuming with %s = %s (was %s)", field, value, old)
    saved = checkpoint.state.get("data_fingerprint")
    if saved != fingerprint:
        raise UserError(
            "data.path",
            "the dataset is not the one the checkpoint was trained on",
            expected=f"fingerprint {str(saved)[:12]}",
            got=fingerprint[:12],
            hint="restore the dataset, or start a fresh run in another run.dir (run.init_from takes weights)",
        )


def _changes_masters(field: str, old: Any, new: Any) -> bool:
    """Whether a change of precision changes the type of master weights and moments."""
    return field == "train.precision" and "fp64" in (old, new)
