"""The order of sequences: a permutation, seeded, with every token seen, the same however it is asked for."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from boost.data.dataset import Split
from boost.data.permutation import permute
from boost.data.sampler import (
    IGNORE,
    batch_hash,
    num_sequences,
    sequence_hash,
    train_sequence,
    validation_sequence,
    validation_sequences,
)

MakeSplit = Callable[[int], Split]


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 129, 255, 256, 257, 1000, 1023, 1025, 4097])
def test_permutation_is_a_bijection(size: int) -> None:
    assert sorted(permute(i, size, f"key {size}") for i in range(size)) == list(range(size))


def test_permutation_beyond_32_and_64_bits() -> None:
    for size in (2**31 + 11, 2**33 - 5, 2**63 - 25, 2**70):
        images = [permute(i, size, "key") for i in [*range(500), *range(size - 500, size)]]
        assert len(set(images)) == 1000 and all(0 <= image < size for image in images)
        assert 0.45 < sum(images) / len(images) / size < 0.55
    with pytest.raises(ValueError):
        permute(5, 5, "key")


def test_permutation_spreads_evenly() -> None:
    # Over many keys each image of a fixed index is about equally frequent.
    counts = np.bincount([permute(0, 5, str(key)) for key in range(2000)], minlength=5)
    assert counts.min() > 300 and counts.max() < 500


def test_known_values() -> None:
    """The order of the data is part of what a checkpoint means: it must not change between versions."""
    assert [permute(i, 10, "order/0/0") for i in range(10)] == [9, 0, 7, 6, 4, 5, 8, 1, 3, 2]


def test_epoch_predicts_each_label_once(split: MakeSplit) -> None:
    for tokens, length in ((101, 10), (109, 10), (110, 10), (8, 7), (50, 1)):
        data = split(tokens)
        windows = num_sequences(data, length)
        assert windows == (tokens - 1) // length
        for epoch in range(3):
            sequences = [train_sequence(data, length, 3, epoch * windows + i) for i in range(windows)]
            for sequence in sequences:
                assert sequence.dtype == np.int64 and sequence.shape == (length + 1,)
                assert ((np.diff(sequence) - 1) % tokens == 0).all()  # neighbours in the ring
            labels = np.concatenate([sequence[1:] for sequence in sequences])
            assert len(np.unique(labels)) == windows * length


def test_tail_rotates(split: MakeSplit) -> None:
    data, length = split(109), 10  # 8 labels are left over each epoch
    windows = num_sequences(data, length)
    missed = []
    for epoch in range(20):
        labels = [train_sequence(data, length, 0, epoch * windows + i)[1:] for i in range(windows)]
        missed.append(frozenset(range(109)) - set(np.concatenate(labels).tolist()))
    assert all(len(rest) == 9 for rest in missed)
    assert not frozenset.intersection(*missed[:3])
    assert len(set(missed)) > 10


def test_seeds_and_epochs_differ_and_repeat(split: MakeSplit) -> None:
    data, length = split(1001), 10
    windows = num_sequences(data, length)

    def order(seed: int, epoch: int) -> list[int]:
        return [int(train_sequence(data, length, seed, epoch * windows + i)[0]) for i in range(windows)]

    orders = [order(seed, epoch) for seed in (0, 1, -1, 2**70) for epoch in range(3)]
    assert len({tuple(o) for o in orders}) == 12
    assert order(1, 2) == orders[5]
    # The order itself differs, not only the place where the ring is cut.
    steps = {tuple((b - a) % 1001 for a, b in pairwise(o)) for o in orders}
    assert len(steps) == 12


def test_far_epoch_and_errors(split: MakeSplit) -> None:
    assert train_sequence(split(100), 7, 0, 2**62 + 3).shape == (8,)
    with pytest.raises(ValueError, match="negative"):
        train_sequence(split(100), 7, 0, -1)
    with pytest.raises(ValueError, match="split of 7 tokens is shorter than one window of 8"):
        train_sequence(split(7), 7, 0, 0)
    with pytest.raises(ValueError, match="not positive"):
        num_sequences(split(7), 0)
    assert num_sequences(split(1), 7) == 0


def test_more_than_2_31_tokens(tmp_path: Path) -> None:
    tokens = 2**31 + 2**20
    path = tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(2 * tokens)
    memory = np.memmap(path, "<u2", "r+")
    memory[-5:] = [1, 2, 3, 4, 5]
    data = Split("train", memory, np.array([0, tokens]), 0)
    assert num_sequences(data, 1) == tokens - 1
    index = validation_sequences(data, 4) - 1
    inputs, labels = validation_sequence(data, 4, 0, index)
    assert labels.tolist() == [2, 3, 4, 5] and inputs.tolist() == [1, 2, 3, 4]
    assert train_sequence(data, 1024, 0, 12345).shape == (1025,)


@pytest.mark.parametrize(("tokens", "length"), [(1, 4), (3, 4), (4, 4), (5, 4), (8, 4), (103, 10), (5, 1)])
def test_validation_predicts_each_token_once(split: MakeSplit, tokens: int, length: int) -> None:
    data, start = split(tokens), 999
    count = validation_sequences(data, length)
    pairs = [validation_sequence(data, length, start, i) for i in range(count)]
    assert all(part.dtype == np.int64 and part.shape == (length,) for pair in pairs for part in pair)
    inputs, labels = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    real = labels != IGNORE
    assert labels[real].tolist() == list(range(tokens))
    assert real[:tokens].all() and not real[tokens:].any()
    assert inputs[:tokens].tolist() == [start, *range(tokens - 1)]
    assert (inputs[tokens:] == start).all()  # a valid id, whose label is ignored
    with pytest.raises(ValueError):
        validation_sequence(data, length, start, count)


def test_hashes() -> None:
    window = np.array([1, 2, 3], dtype=np.int64)
    expected = hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in (1, 2, 3))).digest()
    assert sequence_hash(window) == sequence_hash(window.astype(np.uint16)) == expected
    assert sequence_hash(np.array([1, 9, 2, 9, 3])[::2]) == expected
    assert batch_hash([expected, b"x" * 32]) == hashlib.sha256(expected + b"x" * 32).hexdigest()
    assert batch_hash([expected, b"x" * 32]) != batch_hash([b"x" * 32, expected])


def test_no_torch() -> None:
    code = (
        "import sys, boost.data.prepare, boost.data.train_tokenizer, boost.data.sampler; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
