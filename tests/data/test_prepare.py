"""prepare: what it writes, where it refuses, and that it leaves all or nothing."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from boost.data import prepare as module
from boost.data.corpora import CORPORA
from boost.data.dataset import Dataset
from boost.data.prepare import prepare
from boost.data.tokenizer import load_tokenizer
from boost.data.writer import SplitWriter
from boost.errors import EnvironmentFailure, UserError


def documents(split: Any) -> list[list[int]]:
    return [split.tokens[a:b].tolist() for a, b in zip(split.documents[:-1], split.documents[1:], strict=True)]


def test_shipped_corpus(tmp_path: Path) -> None:
    summary = prepare(["sotu_1790_1899"], tmp_path / "out", "bpe4096", validation_last=6)
    dataset = Dataset.open(tmp_path / "out", vocab_size=4096, sequence_length=1024, verify=True)
    assert dataset.validation is not None
    assert len(dataset.validation) == 130_801
    assert len(dataset.train) == 1_066_436
    assert dataset.train.tokens.dtype == np.dtype("<u2")
    with lzma.open(CORPORA["sotu_1790_1899"], "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    held_out = [record["text"] for record in records if record["year"] >= 1894]
    tokenizer = load_tokenizer(dataset.tokenizer_file)
    decoded = [tokenizer.decode(ids) for ids in documents(dataset.validation)]
    assert decoded == held_out and len(held_out) == 6
    assert dataset.validation.bytes == sum(len(text.encode()) for text in held_out)
    assert [ids[-1] for ids in documents(dataset.train)] == [1] * 104
    assert "130801 tokens" in str(summary) and "end id 1 added" in str(summary) and "no begin added" in str(summary)


def test_layout_on_disk(tmp_path: Path, write_jsonl: Callable[..., Path], word_tokenizer: Callable[..., Path]) -> None:
    source = write_jsonl(["w1 w2", "", "w3", "w4 w5 w6"])
    tokenizer = word_tokenizer(10)
    out = tmp_path / "out"
    seen: list[tuple[int, int]] = []
    summary = prepare([source], out, tokenizer, validation_last=1, progress=lambda d, t: seen.append((d, t)))
    assert sorted(p.name for p in out.iterdir()) == [
        "dataset.json",
        "tokenizer.json",
        "train.bin",
        "train.documents.bin",
        "validation.bin",
        "validation.documents.bin",
    ]
    assert np.fromfile(out / "train.bin", "<u2").tolist() == [1, 2, 10, 3, 10]
    assert np.fromfile(out / "train.documents.bin", "<i8").tolist() == [0, 3, 5]
    assert np.fromfile(out / "validation.bin", "<u2").tolist() == [4, 5, 6, 10]
    assert (out / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    side = summary.side_file
    assert side.train.tokens == 5 and side.train.documents == 2 and side.train.bytes == 7
    assert side.train.max_document_tokens == 3 and side.empty_documents == 1
    assert side.train.token_file.sha256 == hashlib.sha256((out / "train.bin").read_bytes()).hexdigest()
    assert side.sources[0].sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
    assert seen == [(1, 3), (2, 5), (3, 9)]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize(
    ("bos", "eos", "expected"),
    [(False, True, [1, 2, 11]), (True, True, [10, 1, 2, 11]), (True, False, [10, 1, 2]), (False, False, [1, 2])],
)
def test_ends_exactly_once(
    tmp_path: Path,
    write_jsonl: Callable[..., Path],
    word_tokenizer: Callable[..., Path],
    bos: bool,
    eos: bool,
    expected: list[int],
) -> None:
    tokenizer = load_tokenizer(word_tokenizer(10, ["<s>", "</s>"]))
    # A post-processor that adds both ends by itself must not double them.
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 10), ("</s>", 11)])
    path = tmp_path / "post.json"
    tokenizer.save(str(path))
    prepare([write_jsonl(["w1 w2"])], tmp_path / "out", path, bos=bos, eos=eos)
    assert Dataset.open(tmp_path / "out").train.tokens.tolist() == expected


def test_special_token_spelled_in_a_text_is_text(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    prepare([write_jsonl(["<s> a </s> b"])], tmp_path / "out", "bpe4096", bos=True)
    ids = Dataset.open(tmp_path / "out").train.tokens.tolist()
    assert (ids[0], ids[-1], ids.count(0), ids.count(1)) == (0, 1, 1, 1)
    assert load_tokenizer("bpe4096").decode(ids, skip_special_tokens=False) == "<s><s> a </s> b</s>"


def test_one_token_for_both_ends(
    tmp_path: Path, write_jsonl: Callable[..., Path], word_tokenizer: Callable[..., Path]
) -> None:
    prepare([write_jsonl(["w1"])], tmp_path / "out", word_tokenizer(3, ["<|endoftext|>"]), bos=True)
    assert Dataset.open(tmp_path / "out").train.tokens.tolist() == [3, 1, 3]


def test_tokenizer_without_ends(
    tmp_path: Path, write_jsonl: Callable[..., Path], word_tokenizer: Callable[..., Path]
) -> None:
    tokenizer = word_tokenizer(3, [])
    source = write_jsonl(["w1", "w2"])
    with pytest.raises(UserError, match=r"no end token.*--no-eos"):
        prepare([source], tmp_path / "out", tokenizer)
    with pytest.raises(UserError, match="no begin token"):
        prepare([source], tmp_path / "out", tokenizer, eos=False, bos=True)
    prepare([source], tmp_path / "out", tokenizer, eos=False)
    assert documents(Dataset.open(tmp_path / "out").train) == [[1], [2]]


@pytest.mark.parametrize(("words", "dtype"), [(65_535, "<u2"), (65_536, "<u4")])
def test_dtype_switches_above_65536(
    tmp_path: Path, write_jsonl: Callable[..., Path], word_tokenizer: Callable[..., Path], words: int, dtype: str
) -> None:
    prepare([write_jsonl([f"w0 w{words - 1}"])], tmp_path / "out", word_tokenizer(words))
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.vocab_size == words + 1
    assert dataset.train.tokens.dtype == np.dtype(dtype)
    assert dataset.train.tokens.tolist() == [0, words - 1, words]


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "train", 100)
    with pytest.raises(UserError, match=r"a\.txt:1: token id outside the vocabulary \(expected 0 to 99, got 100\)"):
        writer.add(np.array([1, 100]), 5, "a.txt:1")
    with pytest.raises(UserError, match="got -1"):
        writer.add(np.array([1, -1]), 5, "a.txt:1")
    writer.close()


def test_long_document(tmp_path: Path, write_jsonl: Callable[..., Path], word_tokenizer: Callable[..., Path]) -> None:
    long = " ".join(f"w{i % 10}" for i in range(70_000))
    summary = prepare([write_jsonl(["w1", long, "w2"])], tmp_path / "out", word_tokenizer(10))
    assert Dataset.open(tmp_path / "out").train.documents.tolist() == [0, 2, 70_003, 70_005]
    assert summary.side_file.train.max_document_tokens == 70_001


def test_many_batches_keep_the_order(
    tmp_path: Path, write_jsonl: Callable[..., Path], word_tokenizer: Callable[..., Path]
) -> None:
    prepare([write_jsonl([f"w{i}" for i in range(3000)])], tmp_path / "out", word_tokenizer(3000), validation_last=1500)
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.validation is not None
    assert documents(dataset.train) + documents(dataset.validation) == [[i, 3000] for i in range(3000)]


def test_validation_fraction(
    tmp_path: Path, write_jsonl: Callable[..., Path], word_tokenizer: Callable[..., Path]
) -> None:
    texts = [f"w{i}" for i in range(1000)]
    tokenizer = word_tokenizer(1000)

    def held_out(records: list[str], name: str) -> set[int]:
        prepare([write_jsonl(records, f"{name}.jsonl")], tmp_path / name, tokenizer, validation_fraction=0.2)
        dataset = Dataset.open(tmp_path / name)
        assert dataset.validation is not None
        inside, outside = ({ids[0] for ids in documents(s)} for s in (dataset.validation, dataset.train))
        assert len(inside & outside) == 0 and len(inside | outside) == 1000
        return inside

    chosen = held_out(texts, "a")
    assert 150 < len(chosen) < 250
    assert held_out(texts[::-1] + texts, "b") == chosen  # by the text alone: order and copies do not matter


def test_refusals(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    source = write_jsonl(["a", "b", "", "c"])
    out = tmp_path / "out"

    def refused(message: str, inputs: Any = None, **options: Any) -> None:
        with pytest.raises(UserError, match=message) as error:
            prepare(inputs or [source], out, "bpe4096", **options)
        assert error.value.exit_code == 2
        assert not out.exists() and not list(tmp_path.glob(".boost-*"))

    refused("^--validation-last: .*less than 3 documents, got 3.*; a text file is one document", validation_last=3)
    refused("^--validation-last: negative", validation_last=-1)
    refused("out of range", validation_fraction=1.0)
    refused("out of range", validation_fraction=float("nan"))
    refused("excludes --validation-last", validation_last=1, validation_fraction=0.1)
    refused("leaves a split empty", validation_fraction=1e-9)
    refused("on_error", on_error="ignore")
    refused(r"hold no text \(got 2 empty documents\)", [write_jsonl(["", " \n\t"], "empty.jsonl")])
    refused(r"bad\.jsonl:2: .*null", [write_jsonl(["a", {"text": None}], "bad.jsonl")])


def test_skipped_records_are_counted(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    source = write_jsonl(["a", {"text": None}, {"body": "b"}, "c"])
    summary = prepare([source], tmp_path / "out", "bpe4096", on_error="skip")
    assert summary.side_file.skipped_records == 2 and summary.side_file.train.documents == 2
    assert "bad records skipped: 2" in str(summary) and f"{source}:2: " in str(summary)


def test_reuse_and_refusal(
    tmp_path: Path, write_jsonl: Callable[..., Path], word_tokenizer: Callable[..., Path]
) -> None:
    source, tokenizer, out = write_jsonl(["w1", "w2"]), word_tokenizer(5), tmp_path / "out"
    assert not prepare([source], out, tokenizer).reused
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    again = prepare([source], out, tokenizer)
    assert again.reused and "nothing to do" in str(again)
    moved = tmp_path / "elsewhere.jsonl"
    source.rename(moved)
    assert prepare([moved], out, tokenizer).reused
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before

    other_tokenizer = word_tokenizer(5, ["<eos>"], "other.json")  # of the same size
    for inputs, options in (
        ([moved], {"tokenizer": tokenizer, "eos": False}),
        ([moved], {"tokenizer": other_tokenizer}),
        ([write_jsonl(["w1", "w3"])], {"tokenizer": tokenizer}),
    ):
        with pytest.raises(UserError, match="made from other inputs, options or another tokenizer"):
            prepare(inputs, out, **options)
    (out / "train.bin").write_bytes(b"1")
    with pytest.raises(UserError, match="truncated"):
        prepare([moved], out, tokenizer)


def test_places(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    source = write_jsonl(["a"])
    full = tmp_path / "full"
    full.mkdir()
    prepare([source], full, "bpe4096")  # an empty directory is room enough
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious.txt").write_text("x")
    with pytest.raises(UserError, match="not empty and holds no dataset"):
        prepare([source], other, "bpe4096")
    assert [path.name for path in other.iterdir()] == ["precious.txt"]
    with pytest.raises(UserError, match="not a directory"):
        prepare([source], other / "precious.txt", "bpe4096")
    with pytest.raises(EnvironmentFailure, match="cannot write"):
        prepare([source], other / "precious.txt" / "below", "bpe4096")


def test_output_inside_the_input_directory(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    folder = write_jsonl(["a"], "corpus/a.jsonl").parent
    assert not prepare([folder], folder / "prepared", "bpe4096").reused
    assert prepare([folder], folder / "prepared", "bpe4096").reused


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError, OSError(28, "No space left on device")])
def test_interruption_leaves_nothing(
    tmp_path: Path, write_jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, failure: Any
) -> None:
    def fail(documents: int, tokens: int) -> None:
        if documents == 3:
            raise failure

    source = write_jsonl(["a", "b", "c", "d"])
    expected = EnvironmentFailure if isinstance(failure, OSError) else failure
    with pytest.raises(expected):
        prepare([source], tmp_path / "out", "bpe4096", progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["input.jsonl"]

    # The last moment: everything written, not yet named.
    monkeypatch.setattr(module, "_sync", lambda directory: fail(3, 0))
    with pytest.raises(expected):
        prepare([source], tmp_path / "out", "bpe4096")
    assert [path.name for path in tmp_path.iterdir()] == ["input.jsonl"]


def test_killed_process_leaves_no_dataset(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    source, out = write_jsonl(["a", "b", "c", "d"]), tmp_path / "out"
    code = (
        "import os, signal, sys; from boost.data.prepare import prepare; "
        "kill = lambda documents, tokens: documents == 3 and os.kill(os.getpid(), signal.SIGKILL); "
        "prepare([sys.argv[1]], sys.argv[2], 'bpe4096', progress=kill)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(source), str(out)], check=False)
    assert run.returncode == -signal.SIGKILL
    assert not out.exists()
    assert not prepare([source], out, "bpe4096").reused


@pytest.mark.parametrize("name", ["with  space", "[x]", "ü漢字", "-dash", "n" * 250, "step-500-ablation"])
def test_odd_output_paths(
    tmp_path: Path, write_jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = write_jsonl(["a"])
    monkeypatch.chdir(tmp_path)
    assert not prepare([source], f"{name}/", "bpe4096").reused
    assert prepare([source], tmp_path / name, "bpe4096").reused
    (tmp_path / "link").symlink_to(name)
    assert len(Dataset.open("link").train) == 2


def test_same_input_gives_the_same_bytes(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    source = write_jsonl(["some text", "more text"])
    for name in ("a", "b"):
        prepare([source], tmp_path / name, "bpe4096", validation_last=1)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
