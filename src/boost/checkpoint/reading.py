"""Reading checkpoints: which ones are complete, opening one with every check, and filling tensors of any sharding."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from boost.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    parse_json,
    read_bytes,
    read_files,
    read_manifest,
    regular_file,
    step_of,
)
from boost.checkpoint.shards import ShardReader, hash_file
from boost.checkpoint.slices import DTYPES, Slice
from boost.errors import UserError

STATE = "state.json"
_log = logging.getLogger(__name__)


class Checkpoint:
    """A complete checkpoint, opened by `open_checkpoint`.

    Attributes:
        path: its directory.
        step: optimiser steps done when it was saved.
        state: everything saved that is not a tensor.
        state_hash: see `boost.checkpoint.manifest.state_hash`.
        tensors: by (kind, name); `tensors[kind, name].shape` is the unsharded shape, `.dtype` e.g. `F32`.
        files: size and SHA-256 of every file but the manifest.
        stray: names in the directory that the manifest does not know; they are never read.
    """

    def __init__(self, path: Path, manifest: Manifest, stray: tuple[str, ...]) -> None:
        self.path = path
        self.step = manifest.step
        self.state_hash = manifest.state_hash
        self.tensors: dict[tuple[str, str], TensorEntry] = manifest.tensors
        self.files: dict[str, FileEntry] = manifest.files
        self.stray = stray
        state = parse_json(self.read_file(STATE), path / STATE)
        if not isinstance(state, dict):
            raise UserError(str(path / STATE), "not a JSON object")
        self.state: dict[str, Any] = state

    def read_file(self, name: str) -> bytes:
        """Content of a file such as `config.yaml`, always compared with its SHA-256. UserError naming it otherwise."""
        if name not in self.files:
            raise UserError(str(self.path), f"holds no file {name!r}")
        path = check_size(self.path, name, self.files[name])
        data = read_bytes(path)
        if hashlib.sha256(data).hexdigest() != self.files[name].sha256:
            raise UserError(str(path), _DAMAGED)
        return data

    def load(self, targets: Iterable[Slice], *, partial: bool = False, cast: bool = False) -> None:
        """Fills each target's tensor in place from whatever saved slices overlap its box; any sharding to any other.

        Args:
            targets: pieces of any layout, as for `save`; views, e.g. transposed ones, are filled through.
            partial: leave targets alone that the checkpoint lacks, with a line in the log.
            cast: convert to each target's dtype; without it the dtypes must be equal.
        Raises:
            UserError: the checkpoint lacks a target, or has it in another shape or dtype. Nothing is filled then.
        """
        jobs: list[tuple[Slice, TensorEntry]] = []
        missing: list[str] = []
        for target in targets:
            label = f"{target.kind} {target.name}"
            entry = self.tensors.get((target.kind, target.name))
            if entry is None:
                missing.append(label)
                continue
            if entry.shape != target.shape:
                raise UserError(
                    str(self.path),
                    f"{label} was saved in another shape",
                    expected=list(target.shape),
                    got=list(entry.shape),
                )
            if entry.dtype != target.dtype and not cast:
                raise UserError(
                    str(self.path), f"{label} was saved in another dtype", expected=target.dtype, got=entry.dtype
                )
            jobs.append((target, entry))
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            if not partial:
                raise UserError(str(self.path), f"lacks {shown}")
            _log.warning("%s lacks %s; left as they are", self.path, shown)
        with ShardReader(self.path) as reader:
            for target, entry in jobs:
                reader.fill(target, entry)

    def tensor(self, name: str, kind: str = "parameter") -> torch.Tensor:
        """One whole tensor on the host, in its saved dtype. UserError if the checkpoint lacks it."""
        entry = self.tensors.get((kind, name))
        if entry is None:
            raise UserError(str(self.path), f"lacks {kind} {name}")
        with ShardReader(self.path) as reader:
            return reader.whole(entry, DTYPES[entry.dtype])

    def unused(self, targets: Iterable[Slice], kinds: Collection[str]) -> list[str]:
        """Sorted names of saved tensors of these kinds that no target asks for."""
        asked = {(target.kind, target.name) for target in targets}
        return sorted({name for kind, name in self.tensors if kind in kinds and (kind, name) not in asked})


def newest_first(root: Path) -> Iterator[tuple[int, Path, dict[str, FileEntry]]]:
    """The checkpoints directly in `root` that have a sound manifest: step, directory, files; the highest step first.

    Directories that are called like a checkpoint but have no sound manifest are left out, with a line in the log; links
    are left out. Each is looked at when it is its turn.
    """
    try:
        entries = [entry for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return
    steps = ((step_of(entry.name), Path(entry.path)) for entry in entries)
    for step, path in sorted(((step, path) for step, path in steps if step is not None), reverse=True):
        try:
            files = read_files(path)
        except UserError as error:
            _log.warning("ignored: %s", error)
            continue
        yield step, path, files


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """All of `newest_first` as (step, directory), in numeric order."""
    return [(step, path) for step, path, _ in newest_first(root)][::-1]


def latest(root: Path) -> Path | None:
    """The checkpoint of the highest step in `root` that has a sound manifest, or None.

    Its other files are checked when it is opened: what is wrong with them is for the user to know, and no reason to go
    on from an older one.
    """
    return next((path for _, path, _ in newest_first(root)), None)


def open_checkpoint(path: str | os.PathLike[str], *, verify: bool = True, rank: int = 0, world: int = 1) -> Checkpoint:
    """Opens a checkpoint directory, or the newest complete one of a run directory or of its `checkpoints` folder.

    Presence and size of the files are checked always. Files that the manifest does not know are tolerated, listed in
    `stray` and logged, by rank 0: nothing reads them.

    Args:
        verify: compare the files with their SHA-256 too, which reads all of them once.
        rank, world: of `world` callers each checks its own share of the files.
    Raises:
        UserError: naming the file or directory: not a checkpoint, missing, truncated or altered files, a manifest that
            `read_manifest` refuses.
    """
    directory = _find(Path(path))
    manifest = read_manifest(directory)
    if STATE not in manifest.files:
        raise UserError(str(directory), f"not a complete checkpoint: its manifest lists no {STATE}")
    share = {name: check_size(directory, name, manifest.files[name]) for name in list(manifest.files)[rank::world]}
    if verify:
        # Hashing and reading release the interpreter lock, so threads use the cores.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for name, sha256 in zip(share, pool.map(hash_file, share.values()), strict=True):
                if sha256 != manifest.files[name].sha256:
                    raise UserError(str(share[name]), _DAMAGED)
    stray = tuple(sorted(set(os.listdir(directory)) - set(manifest.files) - {MANIFEST})) if rank == 0 else ()
    if stray:
        _log.warning("%s: ignored files that do not belong to the checkpoint: %s", directory, ", ".join(stray[:10]))
    return Checkpoint(directory, manifest, stray)


_DAMAGED = "checksum mismatch: the file is damaged, or belongs to another checkpoint"


def check_size(directory: Path, name: str, entry: FileEntry) -> Path:
    """The path of a checkpoint's file; UserError naming it if it is missing, special, or of another size."""
    path, size = regular_file(directory, name)
    if size != entry.size:
        raise UserError(
            str(path),
            "truncated" if size < entry.size else "has grown",
            expected=f"{entry.size} bytes",
            got=f"{size} bytes",
        )
    return path


def _find(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(str(path), "no such directory")
    if os.path.lexists(path / MANIFEST) or step_of(path.name) is not None:
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest = latest(root)
    if newest is None:
        raise UserError(str(path), f"not a checkpoint: missing {MANIFEST}, and no complete checkpoint lies in {root}")
    return newest
