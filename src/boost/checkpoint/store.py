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
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import numpy as np

from boost.checkpoint.manifest import (
    MANIFEST,
    MAX_NUMBER,
    FileEntry,
    Manifest,
    TensorEntry,
    check_file_name,
    check_name,
    decode_manifest,
    encode_manifest,
    packed,
    parse_json,
    read_bytes,
    state_hash,
    to_json,
    unpacked,
)
from boost.checkpoint.reading import (
    STATE,
    Checkpoint,
    check_size,
    latest,
    list_checkpoints,
    newest_first,
    open_checkpoint,
)
from boost.checkpoint.shards import ShardReader, shard_keys, sync_directory, write_file, write_shard
from boost.checkpoint.slices import DTYPES, Pieces, Slice, check_cover, raw_bytes
from boost.errors import EnvironmentFailure, PeerFailure, UserError

__all__ = ["Checkpoint", "Slice", "latest", "list_checkpoints", "open_checkpoint", "save"]

# What ranks tell each other in the partial checkpoint, besides a file of each; gone before it is committed.
_PLAN, _SHARES, _WRITTEN, _FOUND = "plan.json", "shares.json", "written.json", "found.json"
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

    Every rank says what it holds. Rank 0 checks that there is room, that the slices cover every tensor exactly once and
    that their list is not too long. Then every rank writes its slices to a file of its own, hashes its share of the
    unsharded tensors from all files, and rank 0 commits. Only rank 0 ever holds the whole list. Ranks meet in `barrier`
    only, also when one of them fails: then all raise, the partial checkpoint is removed, and older ones are untouched.

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
        UserError: slices overlap or leave gaps (naming the tensor), are too many, or of a step that another checkpoint
            has; no permission.
        ValueError: `state`, a name or a number is unfit.
    """
    if step < 0 or keep < 0 or not 0 <= rank < world:
        raise ValueError(f"step {step}, keep {keep}: must not be negative; rank {rank}: must be below world {world}")
    root = Path(root)
    partial, final = root / f".step-{step}.partial", root / f"step-{step}"
    failure: Exception | None = None
    existing: str | None = None  # the state hash of a sound checkpoint that has this step
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
        nonlocal existing
        _sweep(root)  # before all else: what a killed run left must not pass for this save's work
        extra.update({check_file_name(name): data for name, data in (files or {}).items()})
        for name in extra:
            own = name in (STATE, MANIFEST, _PLAN, _SHARES, _WRITTEN, _FOUND)
            if own or re.match(r"(tensors|part|written|hash)-", name):
                raise ValueError(f"{name!r} is the name of one of the checkpoint's own files")
        extra[STATE] = _encode_state(state)
        existing = _make_room(final)
        partial.mkdir()

    pieces: list[Slice] = []
    tensors: list[TensorEntry] = []
    written: dict[str, FileEntry] = {}

    def announce() -> None:
        nonlocal needed
        _refuse_link(root)
        pieces.extend(slices)
        needed = sum(piece.nbytes for piece in pieces)
        _write_part(partial, pieces, rank)

    def plan() -> None:
        tensors.extend(_write_plan(partial, step, [*extra], existing, world))

    def hash_share() -> None:
        nonlocal existing
        existing = _hash_share(partial, rank)

    def gather() -> None:
        for found in _from_every_rank(partial, "written", world, "could not save its part"):
            written.update({name: FileEntry(**entry) for name, entry in found.items()})
        write_file(partial / _WRITTEN, b"{}")

    together(prepare, everyone=False)
    together(announce)
    together(plan, everyone=False)
    agree(partial / _PLAN)
    together(lambda: _write_tensors(partial, pieces, rank))
    together(gather, everyone=False)
    agree(partial / _WRITTEN)
    together(hash_share)
    if existing is None:
        together(lambda: _commit(partial, final, step, tensors, written, extra, world, keep), everyone=False)
    else:
        together(lambda: _find_hash(partial, tensors, world), everyone=False)
        agree(partial / _FOUND)
        together(lambda: _compare(partial, final, existing))
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


def _make_room(final: Path) -> str | None:
    """Moves aside what has the name of the new checkpoint, or returns its state hash if it is a sound checkpoint."""
    if not os.path.lexists(final):
        return None
    try:
        return open_checkpoint(final).state_hash
    except UserError as error:
        # A run that fell back to an older checkpoint comes by here again: it must not stop, nor trust this one.
        aside = next(p for i in count() if not os.path.lexists(p := final.parent / f"{final.name}.damaged{i or ''}"))
        _log.warning("%s; moved to %s", error, aside)
        os.rename(final, aside)
        return None


def _check_space(partial: Path, needed: int) -> None:
    """Compares what all ranks are about to write with the space there is: half a checkpoint helps nobody."""
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise EnvironmentFailure(
            str(partial),
            "no space to save",
            expected=f"{needed} bytes",
            got=f"{free} bytes free",
            hint="older checkpoints are untouched; free some space, or lower checkpoint.keep",
        )


def _from_every_rank(partial: Path, name: str, world: int, otherwise: str) -> Iterator[Any]:
    """What each rank left in a file of its own."""
    for rank in range(world):
        path = partial / f"{name}-{rank:05d}.json"
        if not path.exists():
            raise PeerFailure(str(path), f"rank {rank} {otherwise}")
        yield parse_json(read_bytes(path), path)


def _shard_name(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors"


def _write_part(partial: Path, pieces: list[Slice], rank: int) -> None:
    """Lists what this rank is about to write, and how many bytes that is."""
    for piece in pieces:
        check_name(piece.name), check_name(piece.kind)
    # Empty pieces are listed too: they carry the shape of a tensor that may have no elements at all.
    keys = iter(shard_keys(piece for piece in pieces if piece.nbytes))
    listed = [[p.name, p.kind, p.shape, p.dtype, p.offsets, p.extent, next(keys) if p.nbytes else None] for p in pieces]
    part = {"bytes": sum(piece.nbytes for piece in pieces), "slices": listed}
    write_file(partial / f"part-{rank:05d}.json", to_json(part))


def _write_plan(partial: Path, step: int, extra: list[str], existing: str | None, world: int) -> list[TensorEntry]:
    """Gathers all ranks' parts into the list of tensors, in the order of their names, and checks all that can be.

    What follows is told in two files: the shares of the list, a line for each rank, and where those end.
    """
    needed = 0
    forms: dict[tuple[str, str], tuple[list[int], str]] = {}
    places: dict[tuple[str, str], tuple[list[str], list[str], array[int]]] = {}
    otherwise = "could not save, or has run.dir on another file system"
    for rank, part in enumerate(_from_every_rank(partial, "part", world, otherwise)):
        needed += part["bytes"]
        file = _shard_name(rank)
        for name, kind, shape, dtype, offsets, extent, key in part["slices"]:
            form = forms.setdefault((name, kind), (shape, dtype))
            if form != (shape, dtype):
                raise UserError(
                    f"{kind} {name}",
                    "ranks disagree on its shape or dtype",
                    expected=f"{form[1]} {form[0]}",
                    got=f"{dtype} {shape} on rank {rank}",
                )
            if (name, kind) not in places:
                places[name, kind] = ([], [], array("q"))
            if key is not None:
                files, keys, boxes = places[name, kind]
                files.append(file)
                keys.append(sys.intern(key))
                boxes.extend([*offsets, *extent])
    _check_space(partial, needed)
    tensors = []
    for (name, kind), (shape, dtype) in sorted(forms.items()):
        files, keys, boxes = places.pop((name, kind))
        slices = Pieces(files, keys, np.array(boxes, dtype=np.int64).reshape(len(files), 2, len(shape)))
        try:
            check_cover(tuple(shape), slices)
        except ValueError as error:
            raise UserError(f"{kind} {name}", str(error)) from None
        tensors.append(TensorEntry(name, kind, tuple(shape), dtype, "", slices))
    _check_length(partial, step, tensors, [*map(_shard_name, range(world)), *extra])
    shares = [
        to_json([[entry.name, entry.kind, entry.shape, entry.dtype, entry.slices] for entry in share], unpacked)
        for share in (tensors[rank::world] for rank in range(world))
    ]
    write_file(partial / _SHARES, b"".join(shares))
    write_file(partial / _PLAN, to_json({"existing": existing, "ends": list(accumulate(map(len, shares)))}))
    return tensors


def _check_length(partial: Path, step: int, tensors: list[TensorEntry], names: list[str]) -> None:
    """UserError if readers would refuse the manifest: before the tensors are written, with stand-ins for hashes."""
    largest = FileEntry(MAX_NUMBER, "0" * 64)
    entries = [dataclasses.replace(entry, sha256="0" * 64) for entry in tensors]
    draft = Manifest(step, state_hash(entries), {(e.kind, e.name): e for e in entries}, dict.fromkeys(names, largest))
    count = sum(len(entry.slices) for entry in tensors)
    try:
        decode_manifest(encode_manifest(draft), partial / MANIFEST)
    except UserError as error:
        raise UserError(
            str(error),
            f"so {len(tensors)} tensors in {count} slices cannot be saved",
            hint="divide the state among fewer ranks: parallel.dp_replicate, or parallel.pp in the place of tp or dp",
        ) from None


def _write_tensors(partial: Path, pieces: list[Slice], rank: int) -> None:
    name = _shard_name(rank)
    full = [piece for piece in pieces if piece.nbytes]
    files = {name: dataclasses.asdict(write_shard(partial / name, full))} if full else {}
    write_file(partial / f"written-{rank:05d}.json", to_json(files))


def _hash_share(partial: Path, rank: int) -> str | None:
    """Hashes every world-th tensor from the files just written, one in memory at a time; all are read back.

    Returns:
        The state hash of the checkpoint that has this step already, if there is one.
    """
    plan = parse_json(read_bytes(partial / _PLAN), partial / _PLAN)
    start, end = [0, *plan["ends"]][rank : rank + 2]
    with open(partial / _SHARES, "rb") as file:
        file.seek(start)
        share = parse_json(file.read(end - start), partial / _SHARES)
    hashes = []
    with ShardReader(partial) as reader:
        for name, kind, shape, dtype, slices in share:
            entry = TensorEntry(name, kind, tuple(shape), dtype, "", packed(slices))
            hashes.append(hashlib.sha256(raw_bytes(reader.whole(entry, DTYPES[dtype]))).hexdigest())
    write_file(partial / f"hash-{rank:05d}.json", to_json(hashes))
    existing: str | None = plan["existing"]
    return existing


def _read_hashes(partial: Path, tensors: list[TensorEntry], world: int) -> list[TensorEntry]:
    hashed = tensors.copy()
    for rank, hashes in enumerate(_from_every_rank(partial, "hash", world, "could not read back what was saved")):
        hashed[rank::world] = [
            dataclasses.replace(entry, sha256=sha256)
            for entry, sha256 in zip(tensors[rank::world], hashes, strict=True)
        ]
    return hashed


def _commit(
    partial: Path,
    final: Path,
    step: int,
    tensors: list[TensorEntry],
    written: dict[str, FileEntry],
    extra: dict[str, bytes],
    world: int,
    keep: int,
) -> None:
    hashed = _read_hashes(partial, tensors, world)
    files = written | {name: write_file(partial / name, data) for name, data in extra.items()}
    for name in os.listdir(partial):
        if name not in files:
            os.unlink(partial / name)
    by_name = {(entry.kind, entry.name): entry for entry in hashed}
    write_file(partial / MANIFEST, encode_manifest(Manifest(step, state_hash(hashed), by_name, files)))
    sync_directory(partial)
    os.rename(partial, final)
    sync_directory(final.parent)
    try:
        _retain(final.parent, keep, step)
    except OSError as error:  # the new checkpoint is safe, so this is no reason to fail
        _log.warning("old checkpoints could not be removed: %s", error)


def _find_hash(partial: Path, tensors: list[TensorEntry], world: int) -> None:
    write_file(partial / _FOUND, to_json(state_hash(_read_hashes(partial, tensors, world))))


def _compare(partial: Path, final: Path, existing: str) -> None:
    found = parse_json(read_bytes(partial / _FOUND), partial / _FOUND)
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
    """Removes all complete checkpoints but the newest `keep` and the one of this step.

    Complete is one that has all its files in their sizes. Another does not count, so that no good one goes because of
    it, and stays where it is: whatever it still holds is the user's.
    """
    complete = 0
    for number, path, files in newest_first(root) if keep else ():
        try:
            for name, entry in files.items():
                check_size(path, name, entry)
        except UserError as error:
            _log.warning("not counted by checkpoint.keep: %s", error)
            continue
        complete += 1
        if complete > keep and number != step:
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
