"""Recomputation in backward instead of saved activations.

`recompute_block` repeats everything, collectives included. `recompute_chunk` is for a piece of a block that ends in a
down-projection: neither collectives nor that last GEMM belong to what is repeated, because their results, the
bridged r-wide tensors, are what was saved.

Dropout masks are functions of their place, so there is no generator state to restore.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar, TypeVarTuple

from torch.utils.checkpoint import checkpoint

from boost.kernels.replay import repeating

Args = TypeVarTuple("Args")
R = TypeVar("R")


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
        context_fn=lambda: (nullcontext(), repeating()),
    )


def recomputed(function: Callable[[*Args], R]) -> Callable[[*Args], R]:
    """The function, run by `recompute_chunk`."""

    def run(*args: *Args) -> R:
        return recompute_chunk(function, *args)

    return run


def call(function: Callable[[*Args], R], *args: *Args) -> R:
    """function(*args), saving what it saves."""
    return function(*args)
