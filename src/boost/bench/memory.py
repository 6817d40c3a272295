"""Bytes in memory, counted over live storages."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from boost.parallel.collectives import wraps_local_tensors


class StorageTracker(TorchDispatchMode):
    """Remembers every storage that operations allocate while it is active, without keeping it alive."""

    def __init__(self, *, sample: bool = False, excluding: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._left_out = {tensor.untyped_storage()._cdata for tensor in excluding}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.sample = sample
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if wraps_local_tensors(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.device.type != "meta" and storage._cdata not in self._left_out:
                    self._storages[storage._cdata] = weakref.ref(storage)
        if self.sample:
            alive = {key: ref for key, ref in self._storages.items() if ref() is not None}
            self._storages = alive
            self.peak = max(self.peak, sum(s.nbytes() for s in (ref() for ref in alive.values()) if s is not None))
        return out

    def live_bytes(self, *, excluding: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of the remembered storages that something still holds.

        The least that is seen within a fifth of a second: a backend's thread may hold a finished collective's tensors
        a little longer than the collective takes.
        """
        gc.collect()
        left_out = {tensor.untyped_storage()._cdata for tensor in excluding}
        seen = []
        for _ in range(10):
            alive = {key: ref() for key, ref in self._storages.items()}
            seen.append(sum(s.nbytes() for key, s in alive.items() if s is not None and key not in left_out))
            del alive
            time.sleep(0.02)
        return min(seen)


@contextmanager
def track_storages(*, sample: bool = False, excluding: Iterable[torch.Tensor] = ()) -> Iterator[StorageTracker]:
    """Yields a tracker that is active inside the block and can be asked afterwards.

    Args:
        sample: after every operation, look how much is alive and remember the `peak`; slow. The tracker's attribute
            of that name turns it on and off.
        excluding: tensors that exist already; a view of one, as recomputation makes of parameters, would count it.
    """
    with StorageTracker(sample=sample, excluding=excluding) as tracker:
        yield tracker
