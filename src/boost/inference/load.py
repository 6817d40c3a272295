"""A trained model on one device, from a checkpoint of any layout."""

from __future__ import annotations

import os

import torch
from tokenizers import Tokenizer

from boost.checkpoint.store import Checkpoint, open_checkpoint
from boost.checkpoint.weights import load_weights, saved_config, saved_supports
from boost.data.tokenizer import FILE_NAME, parse_tokenizer
from boost.model.decoder import Decoder
from boost.parallel.mesh import Group, choose_device


def load_model(
    checkpoint: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Decoder:
    """The whole model, in evaluation mode.

    Args:
        checkpoint: a checkpoint, or a run directory (its newest complete checkpoint).
        dtype: of weights and activations; default the stored one (fp32, or fp64 for an fp64 run).
        device: where it goes.

    Returns:
        A module; `model(input_ids)` gives logits [batch, sequence, vocab].

    Raises:
        UserError: not a complete, undamaged checkpoint.
    """
    return model_from(open_checkpoint(checkpoint), dtype=dtype, device=device)


def model_from(
    opened: Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    activations: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Decoder:
    """As `load_model`, from an opened checkpoint; `activations` may have another type than weights."""
    stored = torch.float64 if opened.tensors["parameter", "norm.weight"].dtype == "F64" else torch.float32
    dtype = dtype or stored
    section = saved_config(opened).model
    with torch.device(device):
        model = Decoder(
            section, dtype=activations or dtype, master_dtype=dtype, supports=saved_supports(opened, section)
        )
    load_weights(opened, model, Group(), cast=True)
    return model.eval()


def model_on(opened: Checkpoint, device: str) -> Decoder:
    """For a command's `--device` (auto, cpu or cuda): the stored weights, and on a GPU activations as in training."""
    chosen = choose_device(device, "--device")
    narrow = chosen.type == "cuda" and saved_config(opened).train.precision == "bf16"
    return model_from(opened, activations=torch.bfloat16 if narrow else None, device=chosen)


def tokenizer_from(opened: Checkpoint) -> Tokenizer:
    """The tokenizer of the data that a checkpoint was trained on. UserError naming its file if it is none."""
    return parse_tokenizer(opened.read_file(FILE_NAME), opened.path / FILE_NAME)
