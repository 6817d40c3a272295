"""A random order of any length without a table: a Feistel network with cycle walking.

A Feistel network is a bijection of [0, 4^k) whatever its round function; walking along its cycle until a value falls
below n makes it a bijection of [0, n) (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

import hashlib

_ROUNDS = 8


def permute(index: int, size: int, key: str) -> int:
    """The image of `index` under the permutation of [0, size) that `key` names.

    Args:
        index: in [0, size).
        size: at least 1; Python integers, so there is no upper limit.
        key: any text; each gives another permutation.
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is not in [0, {size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # the domain 4^half is less than 4 times the size
    while True:
        index = _feistel(index, half, key)
        if index < size:
            return index


def pseudo_random(key: str) -> int:
    """A 64-bit number that depends on `key` alone, the same on every machine and in every version."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def _feistel(value: int, half: int, key: str) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (pseudo_random(f"{key}/{turn}/{right}") & mask)
    return left << half | right
