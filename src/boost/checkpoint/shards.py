"""The safetensors files of a checkpoint: writing one rank's pieces, reading any box of a tensor from all ranks' files.

Files are written here, piece by piece, because the library's writer wants every piece on the host at once and reports a
full disk as text. They are read by the library, which checks them again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from boost.checkpoint.manifest import FileEntry, TensorEntry, regular_file
from boost.checkpoint.slices import Piece, Slice, indices, overlap, raw_bytes
from boost.errors import UserError

MAX_HEADER_BYTES = 32 << 20


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable, where the file system can."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some network file systems cannot, and need not
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> FileEntry:
    """Writes and syncs a small file under its own name only once it is whole."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return FileEntry(len(data), hashlib.sha256(data).hexdigest())


def shard_keys(slices: Iterable[Slice]) -> list[str]:
    """The key that each piece has in the safetensors file of its rank."""
    keys: dict[str, None] = {}
    for piece in slices:
        key, count = f"{piece.kind}/{piece.name}", 0
        while key in keys:
            count += 1
            key = f"{piece.kind}/{piece.name}#{count}"
        keys[key] = None
    return list(keys)


def write_shard(path: Path, slices: Sequence[Slice]) -> FileEntry:
    """Writes non-empty pieces into one new safetensors file and syncs it; one piece at a time is on the host.

    Returns:
        The file's size and SHA-256.
    Raises:
        OSError: the disk is full, or worse. Nothing is left behind then.
    """
    keys = {key: index for index, key in enumerate(shard_keys(slices))}
    # Wide elements first, so that each piece is aligned for its dtype and can be read in place.
    order = sorted(keys, key=lambda key: -slices[keys[key]].tensor.element_size())
    header: dict[str, Any] = {}
    end = 0
    for key in order:
        piece = slices[keys[key]]
        start, end = end, end + piece.nbytes
        header[key] = {"dtype": piece.dtype, "shape": list(piece.extent), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    try:
        with open(path, "xb") as file:
            for chunk in (len(text).to_bytes(8, "little"), text):
                file.write(chunk)
                digest.update(chunk)
            for key in order:
                data = raw_bytes(slices[keys[key]].tensor)
                file.write(data)
                digest.update(data)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
    except OSError:
        path.unlink(missing_ok=True)  # frees the room that the other ranks and the run's own logs need
        raise
    return FileEntry(size, digest.hexdigest())


class ShardReader:
    """Reads boxes of tensors from the safetensors files of one directory. A context manager: files stay open in it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def whole(self, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
        """The unsharded tensor on the host."""
        tensor = torch.empty(entry.shape, dtype=dtype)
        self.fill(Slice(entry.name, entry.kind, entry.shape, (0,) * len(entry.shape), tensor), entry)
        return tensor

    def fill(self, target: Slice, entry: TensorEntry) -> None:
        """Copies into `target.tensor`, converting to its dtype, whatever of the saved tensor lies in its box.

        Raises:
            UserError: a file is missing, damaged, or does not hold what the manifest says.
        """
        with torch.no_grad():
            for piece in entry.slices.near(target.offsets, target.extent):
                box = overlap(target.offsets, target.extent, piece.offsets, piece.shape)
                if box is not None:
                    source = self._read(piece, entry.dtype, indices(box, piece.offsets))
                    target.tensor.detach()[indices(box, target.offsets)].copy_(source)

    def _read(self, piece: Piece, dtype: str, index: tuple[slice, ...]) -> torch.Tensor:
        path = self._directory / piece.file
        try:
            if piece.file not in self._files:
                self._files[piece.file] = self._stack.enter_context(open_shard(self._directory, piece.file))
            file = self._files[piece.file]
            part = file.get_slice(piece.key)
            found = (part.get_dtype(), tuple(part.get_shape()))
            if found != (dtype, piece.shape):
                raise UserError(
                    str(path),
                    f"{piece.key} is not what the manifest says",
                    expected=f"{dtype} {list(piece.shape)}",
                    got=f"{found[0]} {list(found[1])}",
                )
            tensor: torch.Tensor = part[index] if index else file.get_tensor(piece.key)
        except SafetensorError as error:
            raise UserError(str(path), f"cannot be read: {error}") from None
        return tensor


def open_shard(directory: Path, name: str) -> Any:
    """Opens a safetensors file mapped into memory, after checking that its header is not absurd.

    Raises:
        UserError, SafetensorError: it is not a sound safetensors file.
    """
    path, size = regular_file(directory, name)
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > min(MAX_HEADER_BYTES, size - 8):
        raise UserError(str(path), "damaged: absurd header", expected=f"at most {MAX_HEADER_BYTES} bytes", got=header)
    return safe_open(path, framework="pt", device="cpu")


def hash_file(path: Path) -> str:
    """SHA-256 (hex) of a file's content; UserError naming it if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from None
