"""Loading a tokenizer, finding its special ids, training one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from boost.data import tokenizer as module
from boost.data.corpora import CORPORA, TOKENIZERS
from boost.data.tokenizer import load_tokenizer, special_ids, tokenizer_file, vocabulary_size
from boost.data.train_tokenizer import train_tokenizer
from boost.errors import UserError


def test_shipped_files() -> None:
    def digest(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    assert digest(CORPORA["sotu_1790_1899"]) == "7481d0ffdce33faf1b3fb79391d93e5618fe8512400a3734082f69708d65799c"
    assert digest(TOKENIZERS["bpe4096"]) == "d9f1c3e0b9ad1b2bb5a2f07526007a541d163390501b66f932862d272f62e8a6"


def test_shipped_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("bpe4096")
    assert vocabulary_size(tokenizer) == 4096
    ends = special_ids(tokenizer)
    assert (ends.bos, ends.eos) == (0, 1)
    text = "any text: ü 漢字 \U0001f600\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    # An existing path wins over a shipped name.
    monkeypatch.chdir(tmp_path)
    Path("bpe4096").write_text("{}")
    assert tokenizer_file("bpe4096") == Path("bpe4096")


def test_path_directory_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TOKENIZERS["bpe4096"].read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(data)
    assert vocabulary_size(load_tokenizer(tmp_path)) == vocabulary_size(load_tokenizer(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="nearest: bpe4096"):
        load_tokenizer("bpe4069")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="no such tokenizer file"):
        load_tokenizer(empty)
    for content in (b"{}", b"\xff", data[:1000]):
        (empty / "tokenizer.json").write_bytes(content)
        with pytest.raises(UserError, match="not a tokenizer"):
            load_tokenizer(empty)
    monkeypatch.setattr(module, "SIZE_LIMIT", 1000)
    with pytest.raises(UserError, match=r"too large.*at most 1000 bytes, got 271463"):
        load_tokenizer(tmp_path)


def test_truncation_padding_and_dropout_are_off(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bpe4096")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.model.dropout = 0.9
    path = tmp_path / "t.json"
    tokenizer.save(str(path))
    expected = load_tokenizer("bpe4096").encode("a fairly long sentence").ids
    assert load_tokenizer(path).encode("a fairly long sentence").ids == expected


def test_special_ids_prefer_tokens_marked_special() -> None:
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "<|endoftext|>": 2}, unk_token="a"))
    assert special_ids(tokenizer).eos == 0
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    assert (special_ids(tokenizer).eos, special_ids(tokenizer).bos) == (2, 2)
    assert special_ids(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) == module.SpecialIds(None, None)


def test_train(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    source = write_jsonl(["the cat sat on the mat", "", "the dog sat on the log"] * 20)
    out = tmp_path / "deep" / "own.json"
    result = train_tokenizer([source], 270, out)
    assert (result.vocab_size, result.documents, result.path) == (270, 40, out)
    tokenizer = load_tokenizer(out)
    assert [tokenizer.id_to_token(i) for i in range(3)] == ["<s>", "</s>", "<pad>"]
    text = "bytes never seen: ü 漢字"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [entry.name for entry in out.parent.iterdir()] == ["own.json"]
    with pytest.raises(UserError, match="exists already"):
        train_tokenizer([source], 270, out)
    # So little text has no more pairs to merge: the result says how many entries there are.
    small = train_tokenizer([source], 5000, tmp_path / "small.json")
    assert 270 < small.vocab_size == vocabulary_size(load_tokenizer(tmp_path / "small.json")) < 300
    assert f"{small.vocab_size} entries (not 5000: no more pairs to merge)" in str(small)
    assert "270 entries, trained on 40" in str(result)


def test_train_refusals(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="at least 259, got 100"):
        train_tokenizer([write_jsonl(["text"])], 100, tmp_path / "t.json")
    with pytest.raises(UserError, match="hold no text"):
        train_tokenizer([write_jsonl(["", "  "])], 300, tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_shipped_tokenizer_is_what_training_gives(tmp_path: Path) -> None:
    train_tokenizer(["sotu_1790_1899"], 4096, tmp_path / "t.json")
    ours, shipped = (json.loads(path.read_text("utf-8")) for path in (tmp_path / "t.json", TOKENIZERS["bpe4096"]))
    assert ours["model"] == shipped["model"]
