"""The corpus and the tokenizer that ship with the package, so that a first run needs no download."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from boost.errors import UserError

_HERE = Path(__file__).resolve().parent

CORPORA: Mapping[str, Path] = {"sotu_1790_1899": _HERE / "sotu_1790_1899.jsonl.xz"}
TOKENIZERS: Mapping[str, Path] = {"bpe4096": _HERE / "bpe4096.json"}


def resolve(name_or_path: str | Path, shipped: Mapping[str, Path], kind: str) -> Path:
    """An existing path wins, then a shipped name.

    Args:
        name_or_path: what the user typed.
        shipped: `CORPORA` or `TOKENIZERS`.
        kind: "corpus" or "tokenizer", for the message.

    Raises:
        UserError: neither a path nor a shipped name; the message lists the nearest names.
    """
    path = Path(name_or_path)
    if os.path.exists(path):  # unlike Path.exists, also for names no file system takes
        return path
    if str(name_or_path) in shipped:
        return shipped[str(name_or_path)]
    candidates = list(shipped)
    with contextlib.suppress(OSError, ValueError):
        candidates += [entry.name for entry in path.parent.iterdir() if not entry.name.startswith(".")]
    near = difflib.get_close_matches(path.name, candidates, n=3, cutoff=0.5)
    raise UserError(
        str(name_or_path),
        f"no such file or directory, and no shipped {kind} of that name",
        hint=(f"nearest: {', '.join(near)}; " if near else "") + f"shipped: {', '.join(shipped)}",
    )
