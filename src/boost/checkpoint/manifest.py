"""The manifest of a checkpoint: what lies in the directory, and the checks that make it safe to read.

A checkpoint may come from a stranger. So sizes are limited before anything is parsed, every field is checked before
anything uses it, and no name in a manifest can lead out of its directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import reprlib
import stat
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from boost.checkpoint.slices import DTYPES, Pieces, check_cover
from boost.errors import UserError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_JSON_BYTES = 256 << 20
MAX_MANIFEST_BYTES = 512 << 20
MAX_SYMBOLS = {b"{": 4_000_000, b"[": 8_000_000, b",": 25_000_000}  # objects, lists, values in one JSON file
MAX_TENSORS = 100_000
MAX_PIECES = 65_536  # of one tensor
MAX_FILES = 100_000
MAX_DIMENSIONS = 8
MAX_NAME = 512
MAX_NUMBER = 2**53  # sizes, offsets, steps: what every JSON reader still takes as an exact integer


@dataclass(frozen=True)
class TensorEntry:
    """A saved tensor.

    Attributes:
        name, kind: what it is; together they are unique.
        shape: shape of the unsharded tensor.
        dtype: as safetensors spells it, e.g. `F32`.
        sha256: over the unsharded bytes in row-major order.
        slices: the pieces that cover it exactly once.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str
    slices: Pieces


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 of a file of the checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint holds; `files` names every file but the manifest itself."""

    step: int
    state_hash: str
    tensors: dict[tuple[str, str], TensorEntry]  # by (kind, name)
    files: dict[str, FileEntry]


def state_hash(tensors: Iterable[TensorEntry]) -> str:
    """SHA-256 (hex) over one line per tensor, in order of name and then kind.

    A line is `name kind dtype shape sha256` with single spaces and a newline at its end: dtype as safetensors spells it
    (`F32`), shape as `4096x256` or `scalar` for a tensor without dimensions, sha256 (hex) over the unsharded bytes in
    row-major order, little endian. One state hashes equally however it is cut into slices.
    """
    digest = hashlib.sha256()
    for entry in sorted(tensors, key=lambda entry: (entry.name, entry.kind)):
        shape = "x".join(map(str, entry.shape)) or "scalar"
        digest.update(f"{entry.name} {entry.kind} {entry.dtype} {shape} {entry.sha256}\n".encode())
    return digest.hexdigest()


def to_json(value: Any, other: Callable[[Any], Any] | None = None) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8. ValueError for NaN and infinities, TypeError for what is no JSON.

    Args:
        other: puts what is no JSON into it.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=other)
    return text.encode()


def parse_json(
    data: bytes, where: Path, *, limit: int = MAX_JSON_BYTES, shorten: Callable[[dict[str, Any]], None] | None = None
) -> Any:
    """Strict JSON: no duplicate keys, no NaN or infinities, no absurd size or nesting. UserError otherwise.

    Args:
        limit: the most bytes.
        shorten: called with each object when it has been parsed, and may change it.
    """
    # Counted before parsing: objects in memory take many times the room of their text.
    if len(data) > limit or any(data.count(symbol) > most for symbol, most in MAX_SYMBOLS.items()):
        raise UserError(str(where), "too many entries for a file of a checkpoint")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        if shorten is not None:
            shorten(found)
        return found

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{text} is not a finite number")
        return value

    try:
        return json.loads(data.decode(), object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise UserError(str(where), "the JSON is nested too deeply") from None
    except ValueError as error:  # JSON and UTF-8 errors are ValueErrors too
        raise UserError(str(where), f"not valid JSON here: {error}") from None


def check_name(name: object) -> str:
    """Returns a tensor's name or kind if it is printable and free of white space, which `state_hash` relies on."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable() or " " in name:
        raise ValueError(f"{reprlib.repr(name)} cannot name a tensor or a kind")
    return name


def check_file_name(name: object) -> str:
    """Returns a file's name if it is a plain one: no separator, no `..`, no control character. ValueError otherwise."""
    if not isinstance(name, str) or not 0 < len(name) <= 255 or name in (".", ".."):
        raise ValueError(f"{reprlib.repr(name)} cannot name a file of a checkpoint")
    if not name.isprintable() or "/" in name or "\\" in name:
        raise ValueError(f"{reprlib.repr(name)} must be a plain file name, without directories")
    return name


def regular_file(directory: Path, name: str) -> tuple[Path, int]:
    """Path and size of a regular file in `directory`; UserError if it is absent, special, or a link that leads out."""
    path = directory / name
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UserError(str(path), "missing") from None
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(str(path), "not a regular file")
    if path.is_symlink() and Path(os.path.realpath(path)).parent != Path(os.path.realpath(directory)):
        raise UserError(str(path), "a symbolic link that leaves the checkpoint")
    return path, status.st_size


def read_bytes(path: Path) -> bytes:
    """A file's content; UserError naming it if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from None


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of `manifest.json`; `manifest_sha256` covers the canonical JSON of everything else in it."""
    body: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "state_hash": manifest.state_hash,
        "tensors": [
            {
                "name": entry.name,
                "kind": entry.kind,
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "sha256": entry.sha256,
                "slices": entry.slices,
            }
            for entry in manifest.tensors.values()
        ],
        "files": {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in manifest.files.items()},
    }
    plain = to_json(body, unpacked)
    # The place of this key in the canonical order; what a file of that name has after it is no text.
    signed = f'"manifest_sha256":"{hashlib.sha256(plain).hexdigest()}","state_hash":"'
    return plain.replace(b'"state_hash":"', signed.encode(), 1)


def decode_manifest(data: bytes, path: Path) -> Manifest:
    """Checks the content of a `manifest.json`; errors are those of `read_manifest`, and name `path`."""
    if data.count(b'"kind"') > MAX_TENSORS:  # refused in milliseconds, where parsing would take seconds
        raise UserError(str(path), f"more than {MAX_TENSORS} tensors")
    document = parse_json(data, path, limit=MAX_MANIFEST_BYTES, shorten=_shorten)
    _check_version(document, path)
    claimed = document.pop("manifest_sha256", None)
    try:
        if not isinstance(document.get("tensors"), list) or len(document["tensors"]) > MAX_TENSORS:
            raise ValueError(f"tensors is missing, malformed, or has more than {MAX_TENSORS} entries")
        # Another program's file need not be canonical itself.
        if not _sound(data, claimed) and claimed != hashlib.sha256(to_json(document, unpacked)).hexdigest():
            raise ValueError("checksum mismatch: the manifest was altered or damaged")
        return _manifest(document)
    except (ValueError, RecursionError) as error:
        raise UserError(str(path), str(error)) from None


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks `directory/manifest.json`.

    Raises:
        UserError: naming the file: absent, too big, malformed, altered, of another format version, with names that
            lead out of the directory, with tensors that their pieces do not cover exactly, or of another step than
            the directory's name says.
    """
    path, data = _read(directory)
    manifest = decode_manifest(data, path)
    _check_step(directory, path, manifest.step)
    return manifest


def read_files(directory: Path) -> dict[str, FileEntry]:
    """The files that an undamaged `directory/manifest.json` lists; errors are those of `read_manifest`.

    Its tensors are hashed, not parsed: with many ranks they are nearly all of it.
    """
    path, data = _read(directory)
    end = data.find(b',"tensors":[')  # they come last, and quotes in names are escaped
    with suppress(UserError, ValueError):
        document = parse_json(data[: max(end, 0)] + b"}", path)
        _check_version(document, path)
        named, _, claimed, _, step = _fields(
            document, "files", "format_version", "manifest_sha256", "state_hash", "step"
        )
        if _sound(data, claimed):
            files = _files(named)
            _check_step(directory, path, _number(step))
            return files
    return read_manifest(directory).files  # laid out otherwise, or to be refused with the reason


def _read(directory: Path) -> tuple[Path, bytes]:
    if not os.path.lexists(directory / MANIFEST):
        raise UserError(str(directory), f"not a complete checkpoint: missing {MANIFEST}")
    path, size = regular_file(directory, MANIFEST)
    if size > MAX_MANIFEST_BYTES:
        raise UserError(str(path), "too big", expected=f"at most {MAX_MANIFEST_BYTES} bytes", got=size)
    return path, read_bytes(path)


def _check_version(document: object, path: Path) -> None:
    if not isinstance(document, dict) or "format_version" not in document:
        raise UserError(str(path), "not the manifest of a checkpoint: it has no format_version")
    version = document["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise UserError(
            str(path),
            "unknown format_version",
            expected=FORMAT_VERSION,
            got=f"{reprlib.repr(version)}",
            hint="use the release of boost that wrote it",
        )


def _check_step(directory: Path, path: Path, step: int) -> None:
    named = step_of(os.path.basename(os.path.abspath(directory)))
    if named is not None and named != step:
        raise UserError(str(path), "the step differs from the directory's name", expected=named, got=step)


def _sound(data: bytes, claimed: object) -> bool:
    """Whether the text of a manifest, but for the checksum in it, has that checksum."""
    mark = f'"manifest_sha256":"{_sha256(claimed)}",'.encode()
    start, view = data.find(mark), memoryview(data)  # views: with many ranks a copy is large
    digest = hashlib.sha256(view[: max(start, 0)])
    digest.update(view[start + len(mark) :])
    return start >= 0 and digest.hexdigest() == claimed


def step_of(directory_name: str) -> int | None:
    """N for a directory called exactly `step-N`, else None. Digits elsewhere in a path mean nothing."""
    match = re.fullmatch(r"step-([0-9]{1,15})", directory_name)
    return int(match[1]) if match else None


def _manifest(document: dict[str, Any]) -> Manifest:
    step, claimed, listed, named = _fields(document, "format_version", "step", "state_hash", "tensors", "files")[1:]
    files = _files(named)
    tensors: dict[tuple[str, str], TensorEntry] = {}
    for value in listed:
        entry = _tensor(value, files)
        if (entry.kind, entry.name) in tensors:
            raise ValueError(f"{entry.kind} {entry.name} is listed twice")
        tensors[entry.kind, entry.name] = entry
    if _sha256(claimed) != state_hash(tensors.values()):
        raise ValueError("state_hash does not match the tensors")
    return Manifest(_number(step), claimed, tensors, files)


def _files(named: object) -> dict[str, FileEntry]:
    if not isinstance(named, dict) or len(named) > MAX_FILES:
        raise ValueError(f"files is missing, malformed, or has more than {MAX_FILES} entries")
    files: dict[str, FileEntry] = {}
    for name, value in named.items():
        if check_file_name(name) == MANIFEST:
            raise ValueError(f"{MANIFEST} lists itself")
        size, sha256 = _fields(value, "size", "sha256")
        files[name] = FileEntry(_number(size), _sha256(sha256))
    return files


def _tensor(value: object, files: dict[str, FileEntry]) -> TensorEntry:
    name, kind, shape, dtype, sha256, listed = _fields(value, "name", "kind", "shape", "dtype", "sha256", "slices")
    label = f"{check_name(kind)} {check_name(name)}"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{label}: unknown dtype {reprlib.repr(dtype)}")
    entry = TensorEntry(name, kind, _numbers(shape), dtype, _sha256(sha256), packed(listed, label))
    if math.prod(entry.shape) > MAX_NUMBER:
        raise ValueError(f"{label}: absurd shape {list(entry.shape)}")
    unlisted = set(entry.slices.files) - files.keys()
    if unlisted:
        raise ValueError(f"{label}: a slice in {reprlib.repr(min(unlisted))}, which is not listed in files")
    try:
        check_cover(entry.shape, entry.slices)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None
    return entry


def _shorten(found: dict[str, Any]) -> None:
    """Packs a tensor's slices as soon as they are parsed: of a million objects a few are then alive at a time."""
    if "slices" in found:
        with suppress(ValueError):  # named later, with the tensor
            found["slices"] = packed(found["slices"])


def packed(listed: object, label: str = "a tensor") -> Pieces:
    """Slices as they stand in a manifest, packed. ValueError naming the tensor, `label`, if one is malformed."""
    if isinstance(listed, Pieces):
        return listed
    if not isinstance(listed, list) or len(listed) > MAX_PIECES:
        raise ValueError(f"{label}: slices must be a list of at most {MAX_PIECES}")
    # All of one field at a time: one slice after the other takes several times as long.
    columns = list(zip(*(_fields(item, "file", "key", "offsets", "shape") for item in listed), strict=True))
    files, keys, offsets, shapes = columns or ((), (), (), ())
    if not set(map(type, chain(files, keys))) <= {str}:
        raise ValueError(f"{label}: file and key of a slice must be text")
    if not all(map(str.isprintable, keys)):
        raise ValueError(f"{label}: the key of a slice must be printable")
    if not set(map(type, chain(offsets, shapes))) <= {list}:
        raise ValueError(f"{label}: offsets and shape of a slice must be lists")
    dims = len(shapes[0]) if shapes else 0
    if dims > MAX_DIMENSIONS or set(map(len, chain(offsets, shapes))) - {dims}:
        raise ValueError(f"{label}: offsets and shape of a slice must have the same length, at most {MAX_DIMENSIONS}")
    numbers = list(chain.from_iterable(chain.from_iterable(zip(offsets, shapes, strict=True))))
    for unfit in (n for n in numbers if type(n) is not int or not 0 <= n <= MAX_NUMBER):
        _number(unfit)
    boxes = np.array(numbers, dtype=np.int64).reshape(len(listed), 2, dims)
    return Pieces(list(map(sys.intern, files)), list(map(sys.intern, keys)), boxes)


def unpacked(pieces: object) -> list[dict[str, Any]]:
    """The same slices as they stand in a manifest; TypeError for anything else."""
    if not isinstance(pieces, Pieces):
        raise TypeError(f"{type(pieces).__name__} is not JSON")
    return [
        {"file": file, "key": key, "offsets": offsets, "shape": shape}
        for file, key, (offsets, shape) in zip(pieces.files, pieces.keys, pieces.boxes.tolist(), strict=True)
    ]


def _fields(value: object, *names: str) -> list[Any]:
    if not isinstance(value, dict) or value.keys() != set(names):
        raise ValueError(f"expected an object with exactly {', '.join(names)}, got {reprlib.repr(value)}")
    return [value[name] for name in names]


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:  # bool is an int too, hence `type`
        raise ValueError(f"expected a whole number from 0 to {MAX_NUMBER}, got {reprlib.repr(value)}")
    return value


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise ValueError(f"expected a list of at most {MAX_DIMENSIONS} numbers, got {reprlib.repr(value)}")
    return tuple(_number(item) for item in value)


def _sha256(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError(f"expected a SHA-256 in hexadecimal, got {reprlib.repr(value)}")
    return value
