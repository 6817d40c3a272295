"""`dataset.json`: what a prepared dataset says about itself. Written by `prepare`, checked by `dataset`."""

from __future__ import annotations

import json
import os
import reprlib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from boost.errors import UserError

NAME = "dataset.json"
FORMAT: Final = "boost-dataset"
VERSION: Final = 1
SIZE_LIMIT = 256 * 1024 * 1024  # bytes; a hundred thousand sources take about 20 MB
TOKEN_BYTES = {"uint16": 2, "uint32": 4}
OFFSET_BYTES = 8  # document boundaries are int64
UINT16_VOCABULARY = 65536  # the largest vocabulary whose ids fit in 16 bits


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrowest unsigned type that holds every id below `vocab_size`."""
    return "uint16" if vocab_size <= UINT16_VOCABULARY else "uint32"


def _plain(name: str) -> str:
    """A file name that stays inside the dataset's directory."""
    if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise ValueError(f"{reprlib.repr(name)} is not a plain file name")
    return name


Count = Annotated[int, Field(ge=0, lt=2**62)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileRecord(_Strict):
    """A file in the dataset's directory: its size in bytes and its SHA-256."""

    name: Annotated[str, AfterValidator(_plain)]
    size: Count
    sha256: Sha256


class SplitRecord(_Strict):
    """One split: counts, the UTF-8 bytes of its texts, the longest document in tokens, its two files."""

    documents: Count
    tokens: Count
    bytes: Count
    max_document_tokens: Count
    token_file: FileRecord
    document_file: FileRecord


class SourceRecord(_Strict):
    """An input: its name as given, its size in bytes and the SHA-256 of its content."""

    name: str
    size: Count
    sha256: Sha256


class Options(_Strict):
    """The options of `prepare` that decide what the dataset holds."""

    text_field: str
    validation_last: Count
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    bos: bool
    eos: bool
    on_error: Literal["stop", "skip"]


class SideFile(_Strict):
    """The whole file. `key` hashes the inputs, the options, the tokenizer and the format version."""

    format: Literal["boost-dataset"] = FORMAT
    version: Literal[1] = VERSION
    key: Sha256
    tokenizer: FileRecord
    vocab_size: Annotated[int, Field(ge=1, le=2**31)]
    dtype: Literal["uint16", "uint32"]
    bos_id: Count | None
    eos_id: Count | None
    train: SplitRecord
    validation: SplitRecord | None
    empty_documents: Count
    skipped_records: Count
    options: Options
    sources: list[SourceRecord]

    @model_validator(mode="after")
    def _consistent(self) -> SideFile:
        if self.dtype != token_dtype(self.vocab_size):
            raise ValueError(f"dtype {self.dtype} does not go with a vocabulary of {self.vocab_size}")
        for name, id_ in (("bos_id", self.bos_id), ("eos_id", self.eos_id)):
            if id_ is not None and id_ >= self.vocab_size:
                raise ValueError(f"{name} {id_} is not below the vocabulary size {self.vocab_size}")
        for split in (self.train, self.validation):
            if split is None:
                continue
            if split.tokens == 0 or split.documents == 0:
                raise ValueError("a split is empty")
            if split.token_file.size != split.tokens * TOKEN_BYTES[self.dtype]:
                raise ValueError(f"{split.tokens} tokens of {self.dtype} do not make {split.token_file.size} bytes")
            if split.document_file.size != (split.documents + 1) * OFFSET_BYTES:
                raise ValueError(f"{split.documents} documents do not make {split.document_file.size} bytes of offsets")
        return self

    def to_json(self) -> str:
        """Stable text: the same dataset gives the same bytes."""
        return json.dumps(self.model_dump(), indent=2) + "\n"


def read_side_file(directory: Path) -> SideFile:
    """Reads and checks `dataset.json`.

    Raises:
        UserError: it is missing, malformed, of another format or version, or contradicts itself.
    """
    path = directory / NAME
    remedy = "prepare the dataset again with `boost data prepare`"
    if not os.path.exists(directory):  # unlike Path.exists, also for names no file system takes
        raise UserError(str(directory), "no such dataset", hint="make it with `boost data prepare`")
    if not path.is_file():
        raise UserError(str(directory), f"not a prepared dataset: no {NAME}", hint="make it with `boost data prepare`")
    try:
        size = path.stat().st_size
        if size > SIZE_LIMIT:
            raise UserError(str(path), "too large", expected=f"at most {SIZE_LIMIT} bytes", got=size)
        content: Any = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UserError(str(path), f"cannot read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(str(path), f"not JSON: {error}", hint=remedy) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(str(path), "not the side file of a BOOST dataset", hint=remedy)
    if content.get("version") != VERSION:
        found = reprlib.repr(content.get("version"))
        raise UserError(str(path), "another format version", expected=VERSION, got=found, hint=remedy)
    try:
        return SideFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part)[:60] for part in first["loc"])
        raise UserError(str(path), f"{field}: {first['msg']}" if field else first["msg"], hint=remedy) from error
