"""When a run saves: at once, or behind the training from a snapshot of this rank's slices."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from boost.checkpoint.slices import Slice
from boost.checkpoint.store import save
from boost.errors import BoostError, NumericsError
from boost.parallel.collectives import barrier
from boost.parallel.mesh import Group

_log = logging.getLogger(__name__)


class Saver:
    """Saves the checkpoints of a run from all ranks, one at a time. A context manager.

    Args:
        group: all ranks, in a group that nothing else uses: there a save behind the training meets.
        asynchronous: copy the slices to host memory, and write them while the training goes on.
    """

    def __init__(self, group: Group, *, asynchronous: bool) -> None:
        self.group, self.asynchronous = group, asynchronous
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._step = 0

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # All ranks see a loss that is not finite, so all come here; after a lost peer nobody would meet the others.
        if kind is not None and issubclass(kind, NumericsError):
            with suppress(BoostError):  # the reason why the run ends comes first
                self.wait()
        self._pool.shutdown(wait=False)

    @property
    def failed(self) -> bool:
        """Whether this rank's part of the save behind the training has failed; `wait` then raises on all ranks."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def save(
        self,
        root: Path,
        step: int,
        slices: Iterable[Slice],
        state: dict[str, Any],
        *,
        files: Mapping[str, bytes],
        keep: int,
    ) -> None:
        """Writes `root/step-{step}`, or begins to; arguments and errors are those of `boost.checkpoint.store.save`.

        An asynchronous save waits for the one before it, which is logged as time that training stood still, and
        raises what ended that.
        """
        began = time.perf_counter()
        if self._pending is not None and not self._pending.done():
            _log.info("step %d is due to be saved while step %d still is; waiting", step, self._step)
        self._finish()

        def write(pieces: Iterable[Slice], blocked: str) -> None:
            path = save(
                root,
                step,
                pieces,
                state,
                files=files,
                rank=self.group.rank,
                world=self.group.size,
                barrier=lambda: barrier(self.group),
                keep=keep,
            )
            _log.info("saved %s in %.1f s%s", path, time.perf_counter() - began, blocked)

        if self.asynchronous:
            copies = snapshot(slices)
            blocked = f", of which training stood still for {time.perf_counter() - began:.3f} s"
            self._pending, self._step = self._pool.submit(write, copies, blocked), step
        else:
            write(slices, "")

    def wait(self) -> None:
        """Returns when nothing is being saved; raises what ended the last asynchronous save."""
        began, step = time.perf_counter(), self._step
        saving = self._pending is not None and not self._pending.done()
        self._finish()
        if saving:
            _log.info("training stood still for %.3f s until step %d was saved", time.perf_counter() - began, step)

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def snapshot(slices: Iterable[Slice]) -> list[Slice]:
    """Copies of the slices in host memory: this rank's share once, whatever the model's size."""
    copies, devices = [], set()
    for piece in slices:
        source = piece.tensor.detach()
        # Page-locked memory is what a GPU can copy to quickly; torch keeps it for the next snapshot.
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        target.copy_(source, non_blocking=True)
        copies.append(Slice(piece.name, piece.kind, piece.shape, piece.offsets, target))
        if source.is_cuda:
            devices.add(source.device)
    for device in devices:
        torch.cuda.synchronize(device)
    return copies
