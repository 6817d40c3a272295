"""Which tokens make sequence number i: pure functions, so that any rank can compute any sequence at any time.

The position in the data is the number of sequences consumed, and nothing else: no loader state is saved, and a run goes
on with another number of ranks, workers or sequences a step without repeats or gaps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from boost.data.dataset import Split
from boost.data.permutation import permute, pseudo_random

IGNORE = -100  # the label that the loss passes over

Int64 = npt.NDArray[np.int64]


def num_sequences(split: Split, sequence_length: int) -> int:
    """Training sequences of an epoch: windows of `sequence_length` + 1 tokens at stride `sequence_length`."""
    _check_length(sequence_length)
    return max(0, (len(split) - 1) // sequence_length)


def train_sequence(split: Split, sequence_length: int, seed: int, index: int) -> Int64:
    """Training sequence number `index`, counted from 0 through all epochs.

    An epoch visits its windows in a seeded random order. It leaves up to `sequence_length` - 1 labels over, so the
    tokens are taken as a ring that each epoch cuts at another, seeded place: no token is left out for good. At most one
    window of an epoch runs from the end of the file into its beginning.

    Returns:
        int64 [sequence_length + 1]; inputs are `[:-1]`, labels `[1:]`.

    Raises:
        ValueError: a negative index, or a split shorter than one window.
    """
    windows = num_sequences(split, sequence_length)
    if windows == 0:
        raise ValueError(f"split of {len(split)} tokens is shorter than one window of {sequence_length + 1}")
    if index < 0:
        raise ValueError(f"index {index} is negative")
    epoch, position = divmod(index, windows)
    window = permute(position, windows, f"order/{seed}/{epoch}")
    cut = pseudo_random(f"cut/{seed}/{epoch}") % len(split)
    start = (cut + window * sequence_length) % len(split)
    return _ring(split.tokens, start, sequence_length + 1)


def validation_sequences(split: Split, sequence_length: int) -> int:
    """Sequences that predict every token of the split exactly once."""
    _check_length(sequence_length)
    return -(-len(split) // sequence_length)


def validation_sequence(split: Split, sequence_length: int, start_id: int, index: int) -> tuple[Int64, Int64]:
    """Validation sequence number `index`, in the order of the file.

    Over all sequences each token is a label exactly once, the first one predicted from `start_id`, so the summed loss
    over `split.bytes` gives bits per byte. The last sequence is filled up with inputs `start_id` and labels `IGNORE`.

    Returns:
        (inputs, labels), int64 [sequence_length] each.

    Raises:
        ValueError: no such index.
    """
    count = validation_sequences(split, sequence_length)
    if not 0 <= index < count:
        raise ValueError(f"index {index} is not in [0, {count})")
    start = index * sequence_length
    targets = split.tokens[start : start + sequence_length]
    labels = np.full(sequence_length, IGNORE, dtype=np.int64)
    labels[: len(targets)] = targets
    inputs = np.full(sequence_length, start_id, dtype=np.int64)
    if index > 0:
        inputs[0] = split.tokens[start - 1]
    inputs[1 : len(targets)] = targets[:-1]
    return inputs, labels


def sequence_hash(window: npt.NDArray[Any]) -> bytes:
    """SHA-256 (32 bytes) of a training window's ids as little-endian int64."""
    return hashlib.sha256(np.ascontiguousarray(window, dtype="<i8").tobytes()).digest()


def batch_hash(hashes: Iterable[bytes]) -> str:
    """SHA-256 (hex) over the sequences' hashes in global order: the same however ranks share the batch."""
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _ring(tokens: npt.NDArray[Any], start: int, length: int) -> Int64:
    """`length` tokens from `start` on, going on at the beginning after the end; `length` is at most all of them."""
    head = np.asarray(tokens[start : start + length], dtype=np.int64)
    if len(head) == length:
        return head
    return np.concatenate([head, np.asarray(tokens[: length - len(head)], dtype=np.int64)])


def _check_length(sequence_length: int) -> None:
    if sequence_length < 1:
        raise ValueError(f"sequence_length {sequence_length} is not positive")
