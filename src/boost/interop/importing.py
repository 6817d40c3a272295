"""Import of Hugging Face directories: LLaMA (whole, or cut to a rank), CoLA, CoLA-M, LORO, and our exports.

Names and shapes of all tensors are compared before any is read, and only safetensors files are: nothing is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from boost.checkpoint.manifest import MAX_JSON_BYTES, check_file_name, parse_json, read_bytes, regular_file, step_of
from boost.checkpoint.slices import DTYPES, Slice
from boost.checkpoint.store import save
from boost.checkpoint.weights import PARAMETER
from boost.config import ModelSection, TrainConfig
from boost.data.tokenizer import read_tokenizer, vocabulary_size
from boost.errors import UserError
from boost.interop.names import EXPORT_FORMAT, foreign_name, model_fields, shapes
from boost.interop.staging import staged

Kind = Literal["llama", "boost", "cola", "cola-m", "loro"]
# Tables of a formula, which old releases saved with the weights.
TABLES = ".rotary_emb.inv_freq"
# The linears of a CoLA-M layer are cut in two, each half in the segment that recomputes it.
COLA_M = {
    **{f"self_attn.{name}_proj.cola_a": f"pre_attn.pre_{name}_proj.cola_a" for name in "qkv"},
    **{f"self_attn.{name}_proj.cola_b": f"self_attn.post_{name}_proj.cola_b" for name in "qkv"},
    "self_attn.o_proj.cola_a": "self_attn.pre_o_proj.cola_a",
    "self_attn.o_proj.cola_b": "post_attn.post_o_proj.cola_b",
    **{f"mlp.{name}_proj.cola_a": f"pre_mlp.pre_{name}_proj.cola_a" for name in ("gate", "up")},
    **{f"mlp.{name}_proj.cola_b": f"self_mlp.post_{name}_proj.cola_b" for name in ("gate", "up")},
    "mlp.down_proj.cola_a": "self_mlp.pre_down_proj.cola_a",
}


def import_checkpoint(
    kind: Kind, source: Path, out: Path, *, rank: int | None = None, tokenizer: str | None = None
) -> str:
    """Writes a checkpoint that `run.init_from`, `generate`, `eval` and `export` take, complete or not at all.

    Args:
        kind: whose directory it is.
        source: the directory, with `config.json` and safetensors files.
        out: a new directory.
        rank: cut every linear of a LLaMA to this rank by its singular values.
        tokenizer: as for `boost data prepare`; default the one in `source`.

    Returns:
        Lines for the user: with a rank, the error of every linear.

    Raises:
        UserError: naming the field, the file or the tensor that is unfit.
    """
    if rank is not None and kind != "llama":
        raise UserError("--rank", f"cuts whole linears, and {kind} has pairs already", hint="leave it out")
    read, name_of, model_type = _KINDS[kind]
    with Weights(source) as weights:
        described = _config(source, model_type)
        where = str(source / "config.json")
        fields = model_fields(described, where) | read(described, weights, where)
        length = described.get("max_position_embeddings")
        train: dict[str, Any] = {"sequence_length": length} if type(length) is int and length > 0 else {}
        model = TrainConfig.from_dict({"model": fields, "train": train}).model
        placed = {name: name_of(name, model) for name in shapes(model)}
        weights.check({key: shape for name, shape in shapes(model).items() for key, shape in [placed[name].of(shape)]})
        if model.tie_embeddings:
            weights.check_tied(placed["embedding.weight"].key, "lm_head.weight")
        dtype = weights.dtype(placed["norm.weight"].key)
        tensors = {name: place.read(weights).to(dtype) for name, place in placed.items()}
    report: list[str] = []
    if rank is not None:
        fields |= {"linear": "low_rank", "rank": rank, "bottleneck_activation": "none"}
        tensors = dict(_cut(tensors, rank, report))
    train |= {"precision": "fp64"} if dtype == torch.float64 else {}
    config = TrainConfig.from_dict({"model": fields, "train": train})
    data = _tokenizer(source, tokenizer, config.model)
    slices = [
        Slice(name, PARAMETER, tuple(tensor.shape), (0,) * tensor.dim(), tensor) for name, tensor in tensors.items()
    ]
    step = step_of(out.name) or 0
    state = {"step": step, "optimizer_steps": 0, "data_fingerprint": ""}
    with staged(out, f"step-{step}") as partial:
        save(partial, step, slices, state, files={"config.yaml": config.to_yaml().encode(), "tokenizer.json": data})
    count = sum(tensor.numel() for tensor in tensors.values())
    return "\n".join([*report, f"imported {out}: {count:,} parameters ({config.model.linear})"])


def factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """The best pair of a rank for a dense weight, from its singular values in fp64.

    Balanced: A and B get the root of each singular value. The signs, which the decomposition leaves free, are such that
    the largest element of each column of B is positive.

    Args:
        weight: [d_out, d_in].

    Returns:
        `down` [r, d_in] and `up` [d_out, r] in its dtype, and |W - up down| / |W|, before rounding to that dtype.
    """
    u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
    u, v, root = u[:, :rank], v[:rank], s[:rank].sqrt()
    signs = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()[0]
    lost, whole = s[rank:].square().sum(), s.square().sum()
    error = float((lost / whole).sqrt()) if whole > 0 else 0.0
    down, up = (root * signs)[:, None] * v, u * (root * signs)
    return down.to(weight.dtype), up.to(weight.dtype), error


def _cut(tensors: Mapping[str, Tensor], rank: int, report: list[str]) -> Iterator[tuple[str, Tensor]]:
    errors = []
    for name, tensor in tensors.items():
        if not name.startswith("blocks.") or tensor.dim() == 1:
            yield name, tensor
            continue
        prefix = name.removesuffix(".weight")
        if rank > min(tensor.shape):
            raise UserError("--rank", f"{prefix} has no such rank", expected=f"at most {min(tensor.shape)}", got=rank)
        down, up, error = factors(tensor, rank)
        errors.append(error)
        report.append(f"{prefix}: relative error {error:.4f}")
        yield f"{prefix}.down.weight", down
        yield f"{prefix}.up.weight", up
    report.append(f"rank {rank}: relative error {sum(errors) / len(errors):.4f} on average, {max(errors):.4f} at worst")


class Place:
    """Where a canonical tensor lies in a foreign checkpoint, and whether transposed."""

    def __init__(self, key: str, transposed: bool = False) -> None:
        self.key, self.transposed = key, transposed

    def of(self, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Its key, and its shape there."""
        return self.key, shape[::-1] if self.transposed else shape

    def read(self, weights: Weights) -> Tensor:
        """The tensor in canonical orientation."""
        tensor = weights.read(self.key)
        return tensor.t().contiguous() if self.transposed else tensor


class Weights:
    """The safetensors files of a directory. A context manager: files stay open in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Weights:
        for name in _weight_files(self.directory):
            path, _ = regular_file(self.directory, name)
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise UserError(str(path), f"not a readable safetensors file: {error}") from None
            for key in file.keys():  # noqa: SIM118
                if key in self.files:
                    raise UserError(str(path), f"holds {key[:200]}, which another file has too")
                self.files[key] = file
        return self

    def __exit__(self, *_: object) -> None:
        self.files.clear()
        self._stack.close()

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        if key not in self.files:
            raise UserError(str(self.directory), f"lacks {key}")
        return tuple(self.files[key].get_slice(key).get_shape())

    def dtype(self, key: str) -> torch.dtype:
        """The type of master weights that holds a tensor: fp64 for fp64, else fp32."""
        return torch.float64 if self.files[key].get_slice(key).get_dtype() == "F64" else torch.float32

    def read(self, key: str) -> Tensor:
        """A tensor, whole. UserError if it holds NaN or infinities."""
        tensor = self.files[key].get_tensor(key)
        if not tensor.isfinite().all():
            raise UserError(str(self.directory), f"{key} holds numbers that are not finite")
        return tensor

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """UserError naming tensors that are missing, left over, of another shape, or not of floats."""
        for key, shape in expected.items():
            if self.shape(key) != shape:
                raise UserError(
                    str(self.directory), f"{key} has another shape", expected=list(shape), got=list(self.shape(key))
                )
            spelling = self.files[key].get_slice(key).get_dtype()
            if spelling not in DTYPES or not DTYPES[spelling].is_floating_point:
                raise UserError(str(self.directory), f"{key}: not F64, F32, F16 or BF16", got=spelling)
        tied = {"lm_head.weight"} if "lm_head.weight" not in expected else set()
        extra = sorted(key for key in self.files if key not in {*expected, *tied} and not key.endswith(TABLES))
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise UserError(str(self.directory), f"unknown tensor {extra[0][:200]}{more}")

    def check_tied(self, table: str, head: str) -> None:
        """UserError if the configuration says that two tables are one and the weights say otherwise."""
        if head in self.files and (
            self.shape(head) != self.shape(table) or not torch.equal(self.read(head), self.read(table))
        ):
            raise UserError(
                str(self.directory),
                f"{head} differs from {table}, though tie_word_embeddings is true",
                hint="set it to false in config.json, or remove the wrong tensor",
            )


def _weight_files(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not directory.is_dir():
        raise UserError(str(directory), "no such directory")
    if not index.exists():
        if not (directory / "model.safetensors").exists():
            raise UserError(
                str(directory),
                "has no model.safetensors",
                hint="convert other files first (save_pretrained of transformers does): pickles are not read",
            )
        return ["model.safetensors"]
    named = _json(directory, index.name).get("weight_map")
    if not isinstance(named, dict):
        raise UserError(str(index), "has no weight_map")
    try:
        return sorted({check_file_name(name) for name in named.values()})
    except (ValueError, TypeError) as error:
        raise UserError(str(index), str(error)) from None


def _json(directory: Path, name: str) -> dict[str, Any]:
    path, size = regular_file(directory, name)
    if size > MAX_JSON_BYTES:
        raise UserError(str(path), "too big", expected=f"at most {MAX_JSON_BYTES} bytes", got=size)
    content = parse_json(read_bytes(path), path)
    if not isinstance(content, dict):
        raise UserError(str(path), "not a JSON object")
    return content


def _config(source: Path, model_type: str) -> dict[str, Any]:
    content = _json(source, "config.json")
    if content.get("model_type") != model_type:
        raise UserError(
            str(source / "config.json"),
            "another kind of model",
            expected=f"model_type {model_type}",
            got=str(content.get("model_type"))[:100],
        )
    return content


def _tokenizer(source: Path, chosen: str | None, model: ModelSection) -> bytes:
    if chosen is None and not (source / "tokenizer.json").exists():
        raise UserError(str(source), "has no tokenizer.json", hint="name one with --tokenizer")
    tokenizer, data = read_tokenizer(chosen or source)
    size = vocabulary_size(tokenizer)
    if size > model.vocab_size:
        raise UserError(
            str(chosen or source), "the tokenizer is not this model's", expected=f"ids < {model.vocab_size}", got=size
        )
    return data


def _nothing(config: Mapping[str, Any], weights: Weights, where: str) -> dict[str, Any]:
    return {}


def _boost_fields(config: Mapping[str, Any], weights: Weights, where: str) -> dict[str, Any]:
    found = config.get("export_format", EXPORT_FORMAT)
    if found != EXPORT_FORMAT:
        raise UserError(where, "export_format is another version's", expected=EXPORT_FORMAT, got=str(found)[:100])
    return {
        "linear": "low_rank",
        "rank": config.get("rank") or weights.shape("model.layers.0.self_attn.q_proj.down.weight")[0],
        "bottleneck_activation": config.get("bottleneck_activation", "silu"),
        "crossing": config.get("crossing", "none"),
    }


def _cola_fields(first: str) -> Callable[[Mapping[str, Any], Weights, str], dict[str, Any]]:
    def fields(config: Mapping[str, Any], weights: Weights, where: str) -> dict[str, Any]:
        # The published code always puts hidden_act into the bottleneck, and, unless only_lr_act, on the gate as well.
        if config.get("hidden_act") not in ("silu", "swish") or config.get("lr_act", True) is not True:
            raise UserError(where, "hidden_act and lr_act: only CoLA with SiLU in its bottlenecks is supported")
        gate = "none" if config.get("only_lr_act", True) else "silu"
        rank = weights.shape(first)[1]
        return {"linear": "low_rank", "rank": rank, "bottleneck_activation": "silu", "gate_activation": gate}

    return fields


def _loro_fields(config: Mapping[str, Any], weights: Weights, where: str) -> dict[str, Any]:
    rank = weights.shape("model.layers.0.self_attn.q_proj.weight_in")[1]
    return {"linear": "low_rank", "rank": rank, "bottleneck_activation": "none"}


def _loro_name(name: str, model: ModelSection) -> Place:
    key = foreign_name(name, low_rank=False)
    if key.endswith(".down.weight"):
        return Place(key.removesuffix("down.weight") + "weight_in", transposed=True)
    if key.endswith(".up.weight"):
        return Place(key.removesuffix("up.weight") + "weight_out")
    return Place(key)


def _cola_name(name: str, model: ModelSection) -> Place:
    key = foreign_name(name, low_rank=False)
    for factor, theirs in ((".down.weight", ".cola_a"), (".up.weight", ".cola_b")):
        if key.endswith(factor):
            return Place(key.removesuffix(factor) + theirs, transposed=True)
    return Place(key)


def _cola_m_name(name: str, model: ModelSection) -> Place:
    place = _cola_name(name, model)
    parts = place.key.split(".", 3)
    if len(parts) < 4 or parts[1] != "layers":
        return place
    layer, inner = int(parts[2]), parts[3]
    if inner == "mlp.down_proj.cola_b":  # belongs to the segment that begins here: the next layer's first
        last = layer + 1 == model.layers
        layer, inner = (layer, "post_mlp") if last else (layer + 1, "last_layer_post_mlp")
        inner += ".post_down_proj.cola_b"
    return Place(f"model.layers.{layer}.{COLA_M.get(inner, inner)}", place.transposed)


_Read = Callable[[Mapping[str, Any], Weights, str], dict[str, Any]]
_KINDS: dict[str, tuple[_Read, Callable[[str, ModelSection], Place], str]] = {
    "llama": (_nothing, lambda name, model: Place(foreign_name(name, low_rank=False)), "llama"),
    "boost": (_boost_fields, lambda name, model: Place(foreign_name(name, low_rank=True)), "boost"),
    "cola": (_cola_fields("model.layers.0.self_attn.q_proj.cola_a"), _cola_name, "cola"),
    "cola-m": (_cola_fields("model.layers.0.pre_attn.pre_q_proj.cola_a"), _cola_m_name, "cola_m"),
    "loro": (_loro_fields, _loro_name, "llama"),
}
