"""Training state to and from checkpoints: which tensors, and what may change between saving and resuming."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from boost.checkpoint.saver import Saver
from boost.checkpoint.store import Checkpoint, Slice
from boost.checkpoint.weights import check_supports, parameter_slices, saved_config, support_slices
from boost.config import TrainConfig
from boost.errors import UserError
from boost.parallel.mesh import Group, Mesh

logger = logging.getLogger("boost")

# What a resumed run must have in common with the saved one. The rest may change, and is logged when it does.
FIXED = {
    "model": None,
    "optimizer": ("name", "restart_every"),
    "train": ("sequence_length", "global_batch_size"),
    "data": ("seed",),
}
FREE_MODEL_FIELDS = ("dropout", "lora_dropout")
UNLOGGED = ("run", "logging")


def _moments(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter], dict[str, Tensor]]:
    """What an optimiser keeps for a parameter in the parameter's shape; the rest is one count of steps for all."""
    return lambda parameter: {k: value for k, value in optimizer.state.get(parameter, {}).items() if k != "step"}


def save_state(
    saver: Saver,
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    mesh: Mesh,
    fingerprint: str,
    tokenizer: bytes,
) -> None:
    """Writes `root/step-{step}` from all ranks, or begins to."""
    # Data-parallel replicas are equal: the first writes.
    slices: Iterable[Slice] = ()
    if mesh.replicas.rank == 0:
        tensors = parameter_slices(model, mesh.tp, _moments(optimizer), owned=True)
        slices = chain(tensors, support_slices(model, mesh.tp, owned=True))
    # LORO counts from its last exact step, and ReLoRA's factors, but not its gains and tables, from their last restart.
    optimizer_steps = int(max(state["step"] for state in optimizer.state.values()))
    state = {"step": step, "optimizer_steps": optimizer_steps, "data_fingerprint": fingerprint}
    files = {"config.yaml": config.to_yaml().encode(), "tokenizer.json": tokenizer}
    saver.save(root, step, slices, state, files=files, keep=config.checkpoint.keep)


def load_state(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, tp: Group) -> int:
    """Fills parameters and optimiser state, and returns the number of steps taken."""
    check_supports(checkpoint, model, tp)
    checkpoint.load(parameter_slices(model, tp, _moments(optimizer)))
    for state in optimizer.state.values():
        state["step"].fill_(checkpoint.state["optimizer_steps"])
    return checkpoint.step


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
