"""Saving a checkpoint from all ranks at once; what is saved is complete or invisible.

A checkpoint is written under a hidden name, its manifest comes last, and one rename makes it `step-N`. Whatever a
killed run leaves behind is hidden, and the next save removes it. Tensors lie in safetensors files and all else in JSON,
so reading a checkpoint executes nothing. `boost.checkpoint.reading` has the other half, and its names are here too.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from boost.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    check_file_name,
    check_name,
    encode_manifest,
    parse_json,
    read_bytes,
    read_manifest,
    state_hash,
    to_json,
)
from boost.checkpoint.reading import STATE, Checkpoint, latest, list_checkpoints, open_checkpoint
from boost.checkpoint.shards import ShardReader, sync_directory, write_file, write_shard
from boost.checkpoint.slices import DTYPES, Piece, Slice, check_cover, raw_bytes
from boost.errors import EnvironmentFailure, PeerFailure, UserError

__all__ = ["Checkpoint", "Slice", "latest", "list_checkpoints", "open_checkpoint", "save"]

_ROOM = "room.json"
_PLAN = "plan.json"
_log = logging.getLogger(__name__)


def save(
    root: Path,
    step: int,
    slices: Iterable[Slice],
    state: dict[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
    rank: int = 0,
    world: int = 1,
    barrier: Callable[[], None] = lambda: None,
    keep: int = 0,
) -> Path:
    """Writes `root/step-{step}` from all ranks; every rank calls it, one save at a time per `root`.

    Every rank writes its slices to a file of its own and hashes its share of the unsharded tensors from all files.
    Rank 0 checks that the slices cover every tensor exactly once and commits. Ranks meet in `barrier` only, also when
    one of them fails: then all raise, the partial checkpoint is removed, and older ones are untouched.

    Args:
        root: `run.dir/checkpoints`, on a file system that all ranks share. Its parent must exist, and it must not be a
            symbolic link (resolve it when the run starts): so a directory that is swapped later is noticed before
            anything in it is removed.
        slices: this rank's pieces, none of which another rank holds too; their tensors must not change meanwhile.
        state: plain JSON (dicts with string keys, lists, finite numbers, strings, booleans, None). Rank 0's counts.
        files: more files by plain name, such as `config.yaml`. Rank 0's count.
        barrier: returns when all ranks have called it.
        keep: how many checkpoints to keep, newest by number; the one just written is always kept; 0 keeps all.
    Returns:
        The checkpoint's directory. A sound one of the same step and state is left as it is; one that is damaged or
        incomplete is moved aside as `step-N.damaged`.
    Raises:
        EnvironmentFailure: no space, or the disk fails, or another rank could not save.
        UserError: slices overlap or leave gaps (naming the tensor), another checkpoint has this step, no permission.
        ValueError: `state`, a name or a number is unfit.
    """
    if step < 0 or keep < 0 or not 0 <= rank < world:
        raise ValueError(f"step {step}, keep {keep}: must not be negative; rank {rank}: must be below world {world}")
    root = Path(root)
    partial, final = root / f".step-{step}.partial", root / f"step-{step}"
    failure: Exception | None = None
    existing: str | None = None
    needed = 0

    def together(work: Callable[[], None], *, everyone: bool = True) -> None:
        # A rank that fails still meets the others: they must not wait for it until a timeout.
        nonlocal failure
        if failure is None and (everyone or rank == 0):
            try:
                work()
            except OSError as error:
                failure = _explain(error, partial, needed)
                failure.__cause__ = error
            except Exception as error:
                failure = error
        barrier()

    def agree(evidence: Path) -> None:
        # All ranks look for one file that rank 0 writes only if nobody failed, so all go on or all stop.
        nonlocal failure
        if failure is None and not evidence.exists():
            failure = PeerFailure(str(partial), "another rank could not save its part", hint="its own message says why")
        if failure is not None:
            if rank == 0 and not root.is_symlink():
                with suppress(OSError):  # the failure says more, and the next save tries again
                    _remove(partial)
            raise failure

    extra: dict[str, bytes] = {}

    def prepare() -> None:
        _sweep(root)  # before all else: what a killed run left must not pass for this save's work
        extra.update({check_file_name(name): data for name, data in (files or {}).items()})
        for name in extra:
            if name in (STATE, MANIFEST, _ROOM, _PLAN) or re.match(r"(tensors|size|part|hash)-", name):
                raise ValueError(f"{name!r} is the name of one of the checkpoint's own files")
        extra[STATE] = _encode_state(state)
        _make_room(final)
        partial.mkdir()

    pieces: list[Slice] = []

    def announce() -> None:
        nonlocal needed
        _refuse_link(root)
        pieces.extend(slices)
        needed = sum(piece.nbytes for piece in pieces)
        write_file(partial / f"size-{rank:05d}.json", to_json(needed))

    def hash_share() -> None:
        nonlocal existing
        existing = parse_json(read_bytes(partial / _PLAN), partial / _PLAN)["existing"]
        _hash_share(partial, rank, world)

    together(prepare, everyone=False)
    together(announce)
    together(lambda: _check_space(partial, world), everyone=False)
    agree(partial / _ROOM)
    together(lambda: _write_part(partial, pieces, rank))
    together(lambda: _write_plan(partial, final, world), everyone=False)
    agree(partial / _PLAN)
    together(hash_share)
    if existing is None:
        together(lambda: _commit(partial, final, step, extra, world, keep), everyone=False)
    else:
        together(lambda: _compare(partial, final, world, existing))
    agree(final / MANIFEST)
    if existing is not None and rank == 0:
        with suppress(OSError):
            _remove(partial)
    return final


def _refuse_link(root: Path) -> None:
    if root.is_symlink():
        raise UserError(str(root), "a symbolic link", hint="give the directory that it leads to")


def _sweep(root: Path) -> None:
    _refuse_link(root)
    root.mkdir(exist_ok=True)  # without parents: a run directory that vanished must be noticed
    for entry in list(os.scandir(root)):
        if re.fullmatch(r"\.step-[0-9]+\.partial", entry.name):
            _remove(Path(entry.path))


def _make_room(final: Path) -> None:
    """Moves aside what has the name of the new checkpoint, unless it is a sound checkpoint."""
    if not os.path.lexists(final):
        return
    try:
        open_checkpoint(final)
    except UserError as error:
        # A run that fell back to an older checkpoint comes by here again: it must not stop, nor trust this one.
        aside = next(p for i in count() if not os.path.lexists(p := final.parent / f"{final.name}.damaged{i or ''}"))
        _log.warning("%s; moved to %s", error, aside)
        os.rename(final, aside)


def _check_space(partial: Path, world: int) -> None:
    """Compares what all ranks are about to write with the space there is: half a checkpoint helps nobody."""
    needed = sum(_from_every_rank(partial, "size", world, "could not save, or has run.dir on another file system"))
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise EnvironmentFailure(
            str(partial),
            "no space to save",
            expected=f"{needed} bytes",
            got=f"{free} bytes free",
            hint="older checkpoints are untouched; free some space, or lower checkpoint.keep",
        )
    write_file(partial / _ROOM, to_json(needed))


def _from_every_rank(partial: Path, name: str, world: int, otherwise: str) -> Iterator[Any]:
    """What each rank left in a file of its own."""
    for rank in range(world):
        path = partial / f"{name}-{rank:05d}.json"
        if not path.exists():
            raise PeerFailure(str(path), f"rank {rank} {otherwise}")
        yield parse_json(read_bytes(path), path)


def _write_part(partial: Path, pieces: list[Slice], rank: int) -> None:
    for piece in pieces:
        check_name(piece.name), check_name(piece.kind)
    full = [piece for piece in pieces if piece.nbytes]
    file: FileEntry | None = None
    written: list[Piece] = []
    name = f"tensors-{rank:05d}.safetensors"
    if full:
        file, written = write_shard(partial / name, full)
    # Empty pieces are listed too: they carry the shape of a tensor that may have no elements at all.
    keys = {id(piece): place.key for piece, place in zip(full, written, strict=True)}
    listed = [
        [piece.name, piece.kind, piece.shape, piece.dtype, piece.offsets, piece.extent, keys.get(id(piece))]
        for piece in pieces
    ]
    part = {"file": {name: dataclasses.asdict(file)} if file else {}, "slices": listed}
    write_file(partial / f"part-{rank:05d}.json", to_json(part))


def _write_plan(partial: Path, final: Path, world: int) -> None:
    """Gathers all ranks' parts into the list of tensors, in the order of their names, after checking the cover."""
    files: dict[str, Any] = {}
    pieces: dict[tuple[str, str], list[Piece]] = {}
    forms: dict[tuple[str, str], tuple[list[int], str]] = {}
    for rank, part in enumerate(_from_every_rank(partial, "part", world, "could not save its part")):
        files |= part["file"]
        for name, kind, shape, dtype, offsets, extent, key in part["slices"]:
            form = forms.setdefault((name, kind), (shape, dtype))
            if form != (shape, dtype):
                raise UserError(
                    f"{kind} {name}",
                    "ranks disagree on its shape or dtype",
                    expected=f"{form[1]} {form[0]}",
                    got=f"{dtype} {shape} on rank {rank}",
                )
            places = pieces.setdefault((name, kind), [])
            if key is not None:
                places.append(Piece(next(iter(part["file"])), key, tuple(offsets), tuple(extent)))
    tensors = []
    for (name, kind), (shape, dtype) in sorted(forms.items()):
        try:
            check_cover(tuple(shape), pieces[name, kind])
        except ValueError as error:
            raise UserError(f"{kind} {name}", str(error)) from None
        tensors.append([name, kind, shape, dtype, [dataclasses.astuple(piece) for piece in pieces[name, kind]]])
    existing = read_manifest(final).state_hash if os.path.lexists(final) else None
    write_file(partial / _PLAN, to_json({"existing": existing, "tensors": tensors, "files": files}))


def _read_plan(partial: Path) -> tuple[list[TensorEntry], dict[str, FileEntry]]:
    plan = parse_json(read_bytes(partial / _PLAN), partial / _PLAN)
    tensors = [
        TensorEntry(
            name,
            kind,
            tuple(shape),
            dtype,
            "",
            tuple(Piece(file, key, tuple(offsets), tuple(extent)) for file, key, offsets, extent in pieces),
        )
        for name, kind, shape, dtype, pieces in plan["tensors"]
    ]
    return tensors, {name: FileEntry(**entry) for name, entry in plan["files"].items()}


def _hash_share(partial: Path, rank: int, world: int) -> None:
    """Hashes every world-th tensor from the files just written, one in memory at a time; all are read back."""
    with ShardReader(partial) as reader:
        hashes = [
            hashlib.sha256(raw_bytes(reader.whole(entry, DTYPES[entry.dtype]))).hexdigest()
            for entry in _read_plan(partial)[0][rank::world]
        ]
    write_file(partial / f"hash-{rank:05d}.json", to_json(hashes))


def _read_hashes(partial: Path, world: int) -> tuple[list[TensorEntry], dict[str, FileEntry]]:
    tensors, files = _read_plan(partial)
    for rank, hashes in enumerate(_from_every_rank(partial, "hash", world, "could not read back what was saved")):
        tensors[rank::world] = [
            dataclasses.replace(entry, sha256=sha256)
            for entry, sha256 in zip(tensors[rank::world], hashes, strict=True)
        ]
    return tensors, files


def _commit(partial: Path, final: Path, step: int, extra: dict[str, bytes], world: int, keep: int) -> None:
    tensors, files = _read_hashes(partial, world)
    for name, data in extra.items():
        files[name] = write_file(partial / name, data)
    for name in os.listdir(partial):
        if name not in files:
            os.unlink(partial / name)
    by_name = {(entry.kind, entry.name): entry for entry in tensors}
    write_file(partial / MANIFEST, encode_manifest(Manifest(step, state_hash(tensors), by_name, files)))
    read_manifest(partial)  # nothing is committed that a reader would refuse
    sync_directory(partial)
    os.rename(partial, final)
    sync_directory(final.parent)
    try:
        _retain(final.parent, keep, step)
    except OSError as error:  # the new checkpoint is safe, so this is no reason to fail
        _log.warning("old checkpoints could not be removed: %s", error)


def _compare(partial: Path, final: Path, world: int, existing: str) -> None:
    found = state_hash(_read_hashes(partial, world)[0])
    if found != existing:
        raise UserError(
            str(final),
            "exists already and holds another state",
            expected=f"state_hash {existing}",
            got=found,
            hint="move it away, or choose another run.dir",
        )
    _log.info("%s exists already with the same state; kept", final)


def _retain(root: Path, keep: int, step: int) -> None:
    for number, path in list_checkpoints(root)[:-keep] if keep else []:
        if number != step:
            # Hidden first, in one rename: a kill during the removal leaves nothing that looks like a checkpoint.
            hidden = root / f".{path.name}.partial"
            os.rename(path, hidden)
            _remove(hidden)


def _remove(path: Path) -> None:
    """Removes a directory and what is in it, or the link itself where it is a link; never what a link leads to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _encode_state(state: dict[str, Any]) -> bytes:
    try:
        data = to_json(state)
    except (TypeError, ValueError) as error:
        raise ValueError(f"state is not plain JSON: {error}") from None
    if parse_json(data, Path(STATE)) != state:
        raise ValueError("state would change in JSON: use string keys and lists, not tuples")
    return data


def _explain(error: OSError, path: Path, needed: int) -> UserError:
    where = str(error.filename or path)
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return EnvironmentFailure(where, f"no space to save: {reason}", expected=f"{needed} bytes on this rank")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return UserError(where, f"cannot be written: {reason}")
    return EnvironmentFailure(where, f"cannot be written: {reason}; {needed} bytes on this rank")
