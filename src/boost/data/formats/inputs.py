"""From what the user typed to an ordered list of files, the same on every file system."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from boost.data.corpora import CORPORA, resolve
from boost.data.formats import compression, hub
from boost.errors import UserError

_KINDS = {".txt": "text", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
KNOWN = "txt, jsonl, json, parquet, each plain or with .gz .xz .zst"


@dataclass(frozen=True)
class Source:
    """One file, or one data set of the hub.

    Attributes:
        label: its name in messages and in the side file.
        kind: text, jsonl, parquet or hub.
        compression: .gz, .xz, .zst or "".
        path: the file; None for the hub.
        revision: the pinned commit; "" for a file.
    """

    label: str
    kind: str
    compression: str = ""
    path: Path | None = None
    revision: str = ""

    def digest(self) -> tuple[int, str]:
        """(bytes, SHA-256 of the content); a data set of the hub has 0 and the hash of its name and revision."""
        if self.path is None:
            return 0, hashlib.sha256(f"{self.label}@{self.revision}".encode()).hexdigest()
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return file.tell(), digest
        except OSError as error:
            raise UserError(self.label, f"cannot read: {error.strerror or error}") from error


def expand_inputs(inputs: Sequence[str | Path], exclude: Path | None = None) -> list[Source]:
    """Resolves paths, directories, shipped names and `hf:` names, in the order given.

    A directory stands for the known files under it, sorted by their path in it; hidden files and directories (which
    include the `._*` companions that macOS writes) are passed over.

    Args:
        inputs: at least one.
        exclude: a directory to leave out: where the output goes, in case that lies in an input.

    Raises:
        UserError: nothing there, an unknown format, a directory without data, the same file twice.
    """
    if not inputs:
        raise UserError("INPUT", "no input is named")
    sources = [source for entry in inputs for source in _expand(entry, exclude)]
    seen: set[Path | str] = set()
    for source in sources:
        identity = source.path.resolve() if source.path is not None else source.label
        if identity in seen:
            raise UserError(source.label, "is named twice among the inputs", hint="its documents would count double")
        seen.add(identity)
    return sources


def _expand(entry: str | Path, exclude: Path | None) -> list[Source]:
    if str(entry).startswith(hub.PREFIX) and not os.path.exists(entry):
        return [Source(str(entry), "hub", revision=hub.pin_revision(str(entry)))]
    path = resolve(entry, CORPORA, "corpus")
    if not path.is_dir():
        return [_file(path)]
    files = [_file(file) for file in _walk(path, exclude)]
    if not files:
        raise UserError(_label(path), "the directory holds no data files", expected=KNOWN)
    return files


def _file(path: Path) -> Source:
    kind, packed = _format(path)
    if not kind:
        raise UserError(_label(path), "unknown format", expected=KNOWN, got="".join(path.suffixes[-2:]) or "no suffix")
    if not path.is_file():
        raise UserError(_label(path), "is not a regular file")
    return Source(_label(path), kind, packed, path)


def _format(path: Path) -> tuple[str, str]:
    """(kind, compression), with kind "" for a name that is no known format."""
    name = path.name.lower()
    packed = next((suffix for suffix in compression.SUFFIXES if name.endswith(suffix)), "")
    return _KINDS.get(Path(name.removesuffix(packed)).suffix, ""), packed


def _walk(top: Path, exclude: Path | None) -> list[Path]:
    def unreadable(error: OSError) -> None:
        raise UserError(_label(Path(error.filename)), f"cannot read: {error.strerror}")

    found = []
    for root, folders, files in os.walk(top, onerror=unreadable):  # it would pass over such a directory in silence
        here = Path(root)
        folders[:] = [f for f in folders if not f.startswith(".") and (here / f).resolve() != exclude]
        found += [here / f for f in files if not f.startswith(".") and _format(here / f)[0]]
    return sorted(found, key=lambda file: file.relative_to(top).parts)


def _label(path: Path) -> str:
    """A printable name: file names that are not UTF-8 reach Python with lone surrogates."""
    return os.fsencode(path).decode("utf-8", "replace")
