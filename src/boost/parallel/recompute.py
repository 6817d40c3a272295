"""Recomputation in backward instead of saved activations.

`recompute_block` repeats everything, collectives included. `recompute_chunk` is for a piece of a block that ends in a
down-projection: neither collectives nor that last GEMM belong to what is repeated, because their results, the
bridged r-wide tensors, are what was saved.

Dropout masks are functions of their place, so there is no generator state to restore.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar, TypeVarTuple

from torch.utils.checkpoint import checkpoint

Args = TypeVarTuple("Args")
R = TypeVar("R")

_state = threading.local()


def recompute_block(function: Callable[[*Args], R], *args: *Args) -> R:
    """function(*args), saving only its arguments."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def recompute_chunk(function: Callable[[*Args], R], *args: *Args) -> R:
    """As `recompute_block`; while repeating, `output_is_unused` tells the last GEMM that no one reads its result."""
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), _repeating()),
    )


def recomputed(function: Callable[[*Args], R]) -> Callable[[*Args], R]:
    """The function, run by `recompute_chunk`."""

    def run(*args: *Args) -> R:
        return recompute_chunk(function, *args)

    return run


def call(function: Callable[[*Args], R], *args: *Args) -> R:
    """function(*args), saving what it saves."""
    return function(*args)


def output_is_unused() -> bool:
    """Whether a down-projection runs only so that its inputs are saved again."""
    return getattr(_state, "repeating", False)


@contextmanager
def _repeating() -> Iterator[None]:
    _state.repeating = True
    try:
        yield
    finally:
        _state.repeating = False
