"""Export to a Hugging Face directory, which loads where `boost` is not installed.

Dense models become transformers' own LLaMA. Low-rank ones come with a modelling file that puts pairs in place of its
linears; without an activation between A and B the two can also be multiplied, which gives a LLaMA again. SLTrain's and
ReLoRA's are always merged: A, B and the sparse part, or the frozen matrix, are one matrix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from boost.checkpoint.reading import Checkpoint, open_checkpoint
from boost.checkpoint.slices import DTYPES
from boost.checkpoint.weights import PARAMETER, SUPPORT, saved_config
from boost.config import ModelSection, TrainConfig
from boost.data.tokenizer import special_ids
from boost.errors import UserError
from boost.interop.names import EXPORT_FORMAT, config_fields, foreign_name, shapes
from boost.interop.staging import staged

MODELING = "modeling_boost.py"
SHARD_BYTES = 5 << 30


def export(
    checkpoint: str | os.PathLike[str], out: Path, *, merge: bool = False, shard_bytes: int = SHARD_BYTES
) -> str:
    """Writes a directory for `AutoModelForCausalLM.from_pretrained`; it appears complete or not at all.

    Args:
        checkpoint: a checkpoint, or a run directory.
        out: a new directory.
        merge: multiply the factors of every linear, for a model of transformers' own LLaMA class.
        shard_bytes: weights beyond this go to further files; one file's weights are in memory at a time.

    Returns:
        A line for the user.

    Raises:
        UserError: `out` exists, the model cannot be merged, or the checkpoint is unfit.
        EnvironmentFailure: no space, or the disk fails.
    """
    opened = open_checkpoint(checkpoint)
    config = saved_config(opened)
    _check(config.model, merge)
    with staged(out, "export") as partial:
        (partial / "export").mkdir()
        stock = _write(opened, config, partial / "export", merge, shard_bytes)
    how = "" if stock else ", trust_remote_code=True"
    tokenizer = f"PreTrainedTokenizerFast.from_pretrained({str(out)!r})"
    return f"exported {out}: AutoModelForCausalLM.from_pretrained({str(out)!r}{how}), {tokenizer}"


def _check(model: ModelSection, merge: bool) -> None:
    if model.hidden_size % model.heads:
        raise UserError(
            "model.heads",
            "cannot be exported: transformers' LLaMA wants heads that divide the hidden size",
            expected=f"a divisor of {model.hidden_size}",
            got=model.heads,
        )
    if merge and model.linear == "dense":
        raise UserError("--merge", "a dense model has no factors to multiply", hint="leave it out")
    if model.linear in ("sltrain", "relora") and not merge:
        raise UserError("model.linear", f"{model.linear} is exported as one matrix per linear", hint="add --merge")
    if merge and model.linear == "low_rank" and model.bottleneck_activation != "none":
        raise UserError(
            "--merge",
            f"A and B cannot be multiplied: model.bottleneck_activation = {model.bottleneck_activation} lies between",
            hint="export without it",
        )
    if merge and model.crossing != "none":
        raise UserError(
            "--merge",
            f"A and B cannot be multiplied: model.crossing = {model.crossing} adds another block's bottleneck between",
            hint="export without it",
        )


def _write(opened: Checkpoint, config: TrainConfig, folder: Path, merge: bool, shard_bytes: int) -> bool:
    """Writes all files; returns whether transformers' own class loads them."""
    model = config.model
    stock = merge or model.linear == "dense"
    tokenizer = opened.read_file("tokenizer.json")
    loaded = Tokenizer.from_str(tokenizer.decode("utf-8"))
    special = special_ids(loaded)
    dtype = DTYPES[opened.tensors[PARAMETER, "norm.weight"].dtype]
    ids = {"bos_token_id": special.bos, "eos_token_id": special.eos}
    described: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if stock else "BoostForCausalLM"],
        "model_type": "llama" if stock else "boost",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "max_position_embeddings": config.train.sequence_length,
        **config_fields(model),
        **ids,
        "pad_token_id": None,
    }
    if not stock:
        described["auto_map"] = {
            "AutoConfig": "modeling_boost.BoostConfig",
            "AutoModelForCausalLM": "modeling_boost.BoostForCausalLM",
        }
        described |= {
            "rank": model.rank,
            "bottleneck_activation": model.bottleneck_activation,
            "crossing": model.crossing,
            "export_format": EXPORT_FORMAT,
        }
        (folder / MODELING).write_bytes((files("boost.interop") / MODELING).read_bytes())
    (folder / "tokenizer.json").write_bytes(tokenizer)
    _write_json(folder / "config.json", described)
    _write_json(folder / "generation_config.json", {key: value for key, value in ids.items() if value is not None})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(loaded, config.train.sequence_length))
    _write_weights(_tensors(opened, model, merge), folder, shard_bytes)
    return stock


def _tokenizer_config(tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    special = special_ids(tokenizer)
    ends = {"bos_token": special.bos, "eos_token": special.eos}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        **{name: tokenizer.id_to_token(id_) for name, id_ in ends.items() if id_ is not None},
    }


def _tensors(opened: Checkpoint, model: ModelSection, merge: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its foreign name; with `merge` those of the dense model that computes the same."""
    written = model.model_copy(update={"linear": "dense", "rank": None}) if merge else model
    for name in shapes(written):
        prefix = name.removesuffix(".weight")
        factored = merge and (PARAMETER, f"{prefix}.up.weight") in opened.tensors
        tensor = _merged(opened, model, prefix) if factored else opened.tensor(name)
        yield foreign_name(name, low_rank=written.linear == "low_rank"), tensor.contiguous()


def _merged(opened: Checkpoint, model: ModelSection, prefix: str) -> torch.Tensor:
    """The matrix of one linear: its pair's product and what stands beside it, in fp64, then rounded to their type."""
    assert model.rank is not None
    up, down = opened.tensor(f"{prefix}.up.weight"), opened.tensor(f"{prefix}.down.weight")
    whole = up.double() @ down.double()
    if model.linear != "low_rank":
        whole *= model.lora_alpha / model.rank
    if model.linear == "relora":
        whole += opened.tensor(f"{prefix}.weight").double()
    if model.linear == "sltrain":
        positions = opened.tensor(f"{prefix}.sparse.values", SUPPORT).long()
        whole.view(-1)[positions] += opened.tensor(f"{prefix}.sparse.values").double()
    return whole.to(up.dtype)


def _write_weights(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, shard_bytes: int) -> None:
    """One file, or several of at most `shard_bytes` (or one tensor) and an index."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        nonlocal size
        save_file(held, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()
        size = 0

    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        os.rename(folder / "0.safetensors", folder / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / f"{number}.safetensors", folder / file)
        index |= dict.fromkeys(names, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
