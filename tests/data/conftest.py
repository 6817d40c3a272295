from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from boost.data.dataset import Split


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes records, one a line; strings become {"text": string}."""

    def write(records: Sequence[Any], name: str = "input.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"text": record} if isinstance(record, str) else record) + "\n" for record in records]
        path.write_text("".join(lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """A tokenizer file with one id for each of the words w0, w1, ...; `specials` take the last ids."""

    def write(words: int, specials: Sequence[str] = ("</s>",), name: str = "words.json") -> Path:
        tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(list(specials))
        path = tmp_path / name
        tokenizer.save(str(path))
        return path

    return write


@pytest.fixture
def split() -> Callable[[int], Split]:
    """A split in memory whose token number i has id i, as one document."""

    def make(tokens: int) -> Split:
        return Split("train", np.arange(tokens, dtype=np.uint32), np.array([0, tokens], dtype=np.int64), tokens)

    return make
