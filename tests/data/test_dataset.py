"""Dataset.open: a damaged or unfitting dataset never reaches training."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boost.data import dataset as module
from boost.data.dataset import Dataset
from boost.data.prepare import prepare
from boost.errors import UserError


@pytest.fixture
def prepared(tmp_path: Path, write_jsonl: Callable[..., Path], word_tokenizer: Callable[..., Path]) -> Path:
    texts = [" ".join(f"w{j}" for j in range(i, i + 50)) for i in range(40)]
    prepare([write_jsonl(texts)], tmp_path / "out", word_tokenizer(100, ["<s>", "</s>"]), validation_last=4)
    return tmp_path / "out"


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "dataset.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refused(directory: Path, message: str, **options: Any) -> None:
    with pytest.raises(UserError, match=message) as error:
        Dataset.open(directory, **options)
    assert error.value.exit_code == 2


def test_open(prepared: Path) -> None:
    for verify in (False, True):
        dataset = Dataset.open(str(prepared), vocab_size=102, sequence_length=1835, verify=verify)
        assert dataset.validation is not None
        assert (len(dataset.train), len(dataset.validation)) == (36 * 51, 4 * 51)
        assert dataset.train.documents.dtype == np.int64 and len(dataset.train.documents) == 37
        assert (dataset.bos_id, dataset.eos_id, dataset.vocab_size) == (100, 101, 102)
        assert dataset.tokenizer_file == prepared / "tokenizer.json"
        assert len(dataset.fingerprint) == 64
    with pytest.raises(ValueError):
        dataset.train.tokens[0] = 1


def test_missing_and_foreign(prepared: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such dataset")
    refused(tmp_path, "not a prepared dataset: no dataset.json")
    for name in ("train.bin", "validation.documents.bin", "tokenizer.json"):
        moved = (prepared / name).rename(tmp_path / name)
        refused(prepared, rf"{name}: missing")
        (prepared / name).mkdir()
        refused(prepared, "not a regular file")
        (prepared / name).rmdir()
        (prepared / name).symlink_to(moved)
        refused(prepared, "a link that leaves")
        (prepared / name).unlink()
        moved.rename(prepared / name)
    Dataset.open(prepared)


def test_sizes(prepared: Path) -> None:
    data = (prepared / "train.bin").read_bytes()
    (prepared / "train.bin").write_bytes(data[:-1])
    refused(prepared, rf"train\.bin: truncated \(expected {len(data)} bytes, got {len(data) - 1} bytes\)")
    (prepared / "train.bin").write_bytes(data + b"\0\0")
    refused(prepared, "longer than it was written")
    (prepared / "train.bin").write_bytes(b"")
    refused(prepared, "truncated.*got 0 bytes")


def test_changed_byte_shows_under_verify(prepared: Path) -> None:
    path = prepared / "validation.bin"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    Dataset.open(prepared)
    refused(prepared, r"validation\.bin: changed since", verify=True)


def test_changed_tokenizer_always_shows(prepared: Path) -> None:
    path = prepared / "tokenizer.json"
    path.write_text(path.read_text().replace("w1", "v1"))
    refused(prepared, r"tokenizer\.json: changed since")


@pytest.mark.parametrize("samples", [64, 2])
def test_ids_outside_the_vocabulary(prepared: Path, monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    monkeypatch.setattr(module, "_SAMPLES", samples)
    monkeypatch.setattr(module, "_SAMPLE_LENGTH", 100)
    ids = np.fromfile(prepared / "train.bin", "<u2")
    ids[-3] = 102
    ids.tofile(prepared / "train.bin")
    refused(prepared, rf"train\.bin: .*at token {len(ids) - 3} \(expected less than 102, got 102\)")


def test_boundaries(prepared: Path) -> None:
    offsets = np.fromfile(prepared / "train.documents.bin", "<i8")
    offsets[-1] += 1
    offsets.tofile(prepared / "train.documents.bin")
    refused(prepared, "boundaries do not span")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not the side file"),
        (b"{}", "not the side file"),
        (b'{"format": "boost-dataset"}', "format version"),
        (b'{"format": "boost-dataset", "version": 2}', "format version.*expected 1, got 2"),
        (b'{"format": "boost-dataset", "version": 1}', "key: Field required"),
        (b'{"format": "boost-dataset", "version": "' + b"2" * 9999 + b'"}', r"expected 1, got .{,50}\)"),
    ],
)
def test_malformed_side_file(prepared: Path, content: bytes, message: str) -> None:
    (prepared / "dataset.json").write_bytes(content)
    refused(prepared, message)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train.token_file.name", "../train.bin", "not a plain file name"),
        ("train.token_file.name", "/etc/passwd", "not a plain file name"),
        ("tokenizer.name", "..", "not a plain file name"),
        ("train.token_file.name", "a\0b", "not a plain file name"),
        ("train.tokens", 1e9, "train.tokens"),
        ("train.tokens", "1836", "train.tokens"),
        ("train.tokens", -1, "train.tokens"),
        ("train.tokens", 10**30, "train.tokens"),
        ("train.tokens", 1837, "do not make 3672 bytes"),
        ("train.documents", 37, "do not make 296 bytes"),
        ("dtype", "float32", "dtype"),
        ("dtype", "uint32", "does not go with a vocabulary of 102"),
        ("eos_id", 102, "eos_id 102 is not below"),
        ("vocab_size", 0, "vocab_size"),
        ("surprise", 1, "surprise"),
    ],
)
def test_absurd_side_file(prepared: Path, path: str, value: object, message: str) -> None:
    def change(content: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            content = content[parent]
        content[last] = value

    edit(prepared, change)
    refused(prepared, message)


def test_unfitting_model(prepared: Path) -> None:
    refused(prepared, r"larger than the model's \(expected at most model.vocab_size 101, got 102\)", vocab_size=101)
    refused(prepared, r"at least 1837 tokens .*got 1836 tokens", sequence_length=1836)


def test_fingerprint(prepared: Path, tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    first = Dataset.open(prepared).fingerprint
    assert Dataset.open(prepared.rename(tmp_path / "moved")).fingerprint == first
    source = write_jsonl(["w1 w2", "w3"], "other.jsonl")
    tokenizer = tmp_path / "words.json"
    prints = {first}
    for name, options in (("a", {}), ("b", {"eos": False}), ("c", {"validation_last": 1})):
        prepare([source], tmp_path / name, tokenizer, **options)
        prints.add(Dataset.open(tmp_path / name).fingerprint)
    assert len(prints) == 4


def test_worker_processes_map_the_files_again(prepared: Path) -> None:
    split = Dataset.open(prepared).train
    sent = pickle.dumps(split)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert isinstance(received.tokens, np.memmap)
    assert np.array_equal(received.tokens, split.tokens) and np.array_equal(received.documents, split.documents)
    assert (received.name, received.bytes) == (split.name, split.bytes)
