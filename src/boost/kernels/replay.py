"""Whether an operation runs again only so that its inputs are saved again (`boost.parallel.recompute`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_state = threading.local()


def output_is_unused() -> bool:
    """True while a chunk is recomputed: what its last GEMM would give is not read by anyone.

    Never in compiled code, which is the same for both runs.
    """
    return not torch.compiler.is_compiling() and getattr(_state, "repeating", False)


@contextmanager
def repeating() -> Iterator[None]:
    """Inside the block `output_is_unused` is true, in this thread."""
    _state.repeating = True
    try:
        yield
    finally:
        _state.repeating = False
