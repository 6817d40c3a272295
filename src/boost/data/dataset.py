"""Opens a prepared dataset and checks what it says before anything trains on it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boost.config import TrainConfig
from boost.data.sidefile import NAME, FileRecord, SideFile, SplitRecord, read_side_file
from boost.errors import UserError

_REMEDY = "prepare the dataset again with `boost data prepare`"
_BLOCK = 1 << 22  # tokens checked at once under `verify`
_SAMPLES, _SAMPLE_LENGTH = 64, 4096  # blocks of tokens looked at otherwise


@dataclass(frozen=True, eq=False)
class Split:
    """One split, mapped from disk.

    Attributes:
        name: "train" or "validation".
        tokens: uint16 or uint32 [tokens], memory-mapped, read-only.
        documents: int64 [documents + 1], memory-mapped: where each document starts, and the end.
        bytes: UTF-8 bytes of the documents' texts.
    """

    name: str
    tokens: npt.NDArray[Any]
    documents: npt.NDArray[np.int64]
    bytes: int

    @staticmethod
    def map(directory: Path, name: str, record: SplitRecord, dtype: str) -> Split:
        """Maps the two files of a split whose sizes have been checked."""
        tokens = np.memmap(directory / record.token_file.name, np.dtype(dtype).newbyteorder("<"), "r")
        documents = np.memmap(directory / record.document_file.name, np.dtype("<i8"), "r")
        return Split(name, tokens, documents, record.bytes)

    def __len__(self) -> int:
        """Tokens."""
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory map travels as a full copy; a loader's worker process maps the files itself instead.
        if isinstance(self.tokens, np.memmap) and isinstance(self.documents, np.memmap):
            maps = ((m.filename, m.dtype.str) for m in (self.tokens, self.documents))
            return _map_again, (self.name, *maps, self.bytes)
        return Split, (self.name, self.tokens, self.documents, self.bytes)


def _map_again(name: str, tokens: tuple[Path, str], documents: tuple[Path, str], text_bytes: int) -> Split:
    return Split(name, np.memmap(*tokens, mode="r"), np.memmap(*documents, mode="r"), text_bytes)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A prepared dataset.

    Attributes:
        path: its directory.
        train, validation: the splits; no validation split is None.
        fingerprint: SHA-256 (hex) over the recorded hashes of the splits and the tokenizer, and how they are stored.
            Two datasets are the same training data if it is equal; it says nothing about files changed since
            (`verify=True` does).
        vocab_size: the tokenizer's largest id plus one.
        bos_id, eos_id: the tokenizer's begin and end ids, whether or not they were added; None where it has none.
        tokenizer_file: the copy of the `tokenizer.json` that made the ids.
        side_file: everything that `dataset.json` says.
    """

    path: Path
    train: Split
    validation: Split | None
    fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    tokenizer_file: Path
    side_file: SideFile

    @staticmethod
    def open(
        path: str | Path,
        *,
        vocab_size: int | None = None,
        sequence_length: int | None = None,
        verify: bool = False,
    ) -> Dataset:
        """Opens and checks a dataset. Without `verify` this reads little, however large the dataset is.

        Args:
            path: the directory that `prepare` wrote.
            vocab_size: the model's; the dataset's must not be larger.
            sequence_length: tokens the model reads at once; the training split must hold one sequence and its labels.
            verify: read everything: the SHA-256 of all files, every token id, every document boundary.

        Raises:
            UserError: something is missing, damaged, contradicts itself or does not go with the model.
        """
        path = Path(path)
        side = read_side_file(path)
        if vocab_size is not None and side.vocab_size > vocab_size:
            raise UserError(
                str(path),
                "the dataset's vocabulary is larger than the model's",
                expected=f"at most model.vocab_size {vocab_size}",
                got=side.vocab_size,
                hint="raise model.vocab_size, or prepare the data with the model's tokenizer",
            )
        _check_file(path, side.tokenizer, verify=True)  # small, and a swapped tokenizer garbles all text
        train = _open_split(path, "train", side.train, side, verify)
        validation = None
        if side.validation is not None:
            validation = _open_split(path, "validation", side.validation, side, verify)
        if sequence_length is not None and len(train) < sequence_length + 1:
            raise UserError(
                str(path),
                "the training split is shorter than one sequence",
                expected=f"at least {sequence_length + 1} tokens (train.sequence_length {sequence_length} + 1)",
                got=f"{len(train)} tokens",
                hint="add text, or lower train.sequence_length",
            )
        return Dataset(
            path=path,
            train=train,
            validation=validation,
            fingerprint=_fingerprint(side),
            vocab_size=side.vocab_size,
            bos_id=side.bos_id,
            eos_id=side.eos_id,
            tokenizer_file=path / side.tokenizer.name,
            side_file=side,
        )


def _open_split(directory: Path, name: str, record: SplitRecord, side: SideFile, verify: bool) -> Split:
    _check_file(directory, record.token_file, verify)
    _check_file(directory, record.document_file, verify)
    split = Split.map(directory, name, record, side.dtype)
    _check_boundaries(directory / record.document_file.name, split, verify)
    _check_ids(directory / record.token_file.name, split, side.vocab_size, verify)
    return split


def _check_file(directory: Path, record: FileRecord, verify: bool) -> None:
    path = directory / record.name
    if not path.is_file():
        raise UserError(str(path), "missing, or not a regular file", hint=_REMEDY)
    if path.resolve().parent != directory.resolve():
        raise UserError(str(path), "a link that leaves the dataset's directory", hint="put the file itself there")
    try:
        size = path.stat().st_size
        if size != record.size:
            what = "truncated" if size < record.size else "longer than it was written"
            raise UserError(str(path), what, expected=f"{record.size} bytes", got=f"{size} bytes", hint=_REMEDY)
        if verify:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != record.sha256:
                raise UserError(
                    str(path),
                    f"changed since {NAME} was written",
                    expected=f"SHA-256 {record.sha256}",
                    got=digest,
                    hint=_REMEDY,
                )
    except OSError as error:
        raise UserError(str(path), f"cannot read: {error.strerror or error}") from error


def _check_boundaries(path: Path, split: Split, verify: bool) -> None:
    offsets = split.documents
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(split):
        raise UserError(
            str(path),
            "the document boundaries do not span the tokens",
            expected=f"0 to {len(split)}",
            got=f"{offsets[0]} to {offsets[-1]}",
            hint=_REMEDY,
        )
    if verify and not bool((np.diff(offsets) > 0).all()):
        raise UserError(str(path), "the document boundaries do not increase", hint=_REMEDY)


def _check_ids(path: Path, split: Split, vocab_size: int, verify: bool) -> None:
    """Looks at all ids, or at blocks spread over the file: another width or tokenizer shows in any of them."""
    total = len(split)
    if verify or total <= _SAMPLES * _SAMPLE_LENGTH:
        length, starts = _BLOCK, list(range(0, total, _BLOCK))
    else:
        length = _SAMPLE_LENGTH
        starts = [(total - length) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    for start in starts:
        block = split.tokens[start : start + length]
        if int(block.max()) >= vocab_size:
            at = int(np.argmax(block >= vocab_size))
            raise UserError(
                str(path),
                f"token id outside the vocabulary at token {start + at}",
                expected=f"less than {vocab_size}",
                got=int(block[at]),
                hint=_REMEDY,
            )


def _fingerprint(side: SideFile) -> str:
    lines = [f"{side.version} {side.dtype} {side.vocab_size} tokenizer {side.tokenizer.sha256}"]
    for name, split in (("train", side.train), ("validation", side.validation)):
        if split is not None:
            lines.append(f"{name} {split.token_file.sha256} {split.document_file.sha256}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def open_dataset(config: TrainConfig) -> Dataset:
    """The dataset that a configuration names, checked against its model and sequence length.

    Raises:
        UserError: `data.path` is not set, or as `Dataset.open`.
    """
    if config.data.path is None:
        raise UserError("data.path", "is not set", hint="prepare a dataset with `boost data prepare`")
    if not os.path.exists(config.data.path):  # unlike Path.exists, also for names no file system takes
        where = "" if os.path.isabs(config.data.path) else f" in {Path.cwd()}"
        what = f"no such dataset: {config.data.path}{where}"
        raise UserError("data.path", what, hint="make it with `boost data prepare`, or start in its folder")
    return Dataset.open(
        config.data.path, vocab_size=config.model.vocab_size, sequence_length=config.train.sequence_length
    )
