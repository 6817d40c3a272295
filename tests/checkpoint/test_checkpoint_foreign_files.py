"""What lies in a stranger's checkpoint besides tensors: refused with its name, in a line of bounded length."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from boost.checkpoint.weights import saved_config
from boost.config import TrainConfig
from boost.errors import UserError
from boost.inference.load import tokenizer_from


def holding(data: bytes) -> Any:
    return SimpleNamespace(path=Path("runs/step-1"), read_file=lambda name: data)


def bomb(levels: int) -> bytes:
    """Aliases of aliases: a few hundred bytes that stand for 9 ** levels values."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join([*lines, f"model: {{hidden_size: *a{levels - 1}}}\n"]).encode()


MODEL = "model: {hidden_size: 32, ffn_size: 44, layers: 2, heads: 4, rank: 6, vocab_size: 4096"
CONFIGS = {
    "no YAML": b"model: [1\n",
    "a list": b"- 1\n",
    "nothing": b"",
    "missing": b"train: {}\n",
    "unknown field": f"{MODEL}, newer: 1}}\n".encode(),
    "bytes": b"\xff\xfe\x00",
    "control character": b"model: \x00\n",
    "small bomb": bomb(7),
    "bomb": bomb(40),
    "tag": b"model: !!python/object/apply:os.system [true]\n",
    "nested": b"[" * 100_000,
    "nested value": f"{MODEL}, dropout: {'[' * 12}{']' * 12}}}\n".encode(),
    "wide value": f"{MODEL}, dropout: [{','.join(['[x,x,x,x,x,x,x,x]'] * 900)}]}}\n".encode(),
    "many fields": f"{MODEL}, {', '.join(f'x{n}: 1' for n in range(4000))}}}\n".encode(),
    "long text": f"{MODEL}, linear: {'x' * 900_000}}}\n".encode(),
    "long name": f"{MODEL}, {'x' * 900_000}: 1}}\n".encode(),
    "too large": b"#" * 1_000_001,
}


@pytest.mark.parametrize("data", list(CONFIGS.values()), ids=list(CONFIGS))
def test_a_configuration_that_is_none(data: bytes) -> None:
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        saved_config(holding(data))
    assert time.process_time() - began < 2
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith("runs/step-1/config.yaml")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 30_000


def test_every_preset_is_read_back() -> None:
    config = TrainConfig.load("quickstart")
    assert saved_config(holding(config.to_yaml().encode())) == config


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"version": "1.0", "model": 7}'], ids=range(5))
def test_a_tokenizer_that_is_none(data: bytes) -> None:
    with pytest.raises(UserError, match=r"^runs/step-1/tokenizer\.json: not a tokenizer"):
        tokenizer_from(holding(data))
