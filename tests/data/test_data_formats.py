"""Readers: every format and compression gives the same documents; every defect an error that says where."""

from __future__ import annotations

import builtins
import gzip
import importlib
import json
import lzma
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from boost.data.formats import Faults, expand_inputs, read_documents
from boost.errors import EnvironmentFailure, UserError

TEXTS = ["first document", "zweites Dokument, ü 漢字 \U0001f600", "third\r\nwith\0 odd characters"]


def read(path: Path | str, on_error: Any = "stop", text_field: str = "text") -> list[tuple[str, str]]:
    faults = Faults(on_error)
    return [pair for source in expand_inputs([path]) for pair in read_documents(source, text_field, faults)]


def texts(path: Path | str, **options: Any) -> list[str]:
    return [text for text, _ in read(path, **options)]


def jsonl(records: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in records).encode()


def zstd(data: bytes) -> bytes:
    compressed: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return compressed


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_lines(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / (name + suffix)
    path.write_bytes(PACKERS[suffix](jsonl(TEXTS)))
    assert read(path) == [(text, f"{path}:{i}") for i, text in enumerate(TEXTS, 1)]


@pytest.mark.parametrize("suffix", PACKERS)
def test_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix](b"\xef\xbb\xbfone\r\ntwo\n"))
    assert read(path) == [("one\ntwo\n", f"{path}:1")]


@pytest.mark.parametrize("suffix", PACKERS)
def test_parquet(tmp_path: Path, suffix: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    plain = tmp_path / "plain"
    parquet.write_table(arrow.table({"other": [1, 2, 3], "text": TEXTS}), plain)
    path = tmp_path / f"a.parquet{suffix}"
    path.write_bytes(PACKERS[suffix](plain.read_bytes()))
    assert read(path) == [(text, f"{path}:{i}") for i, text in enumerate(TEXTS, 1)]


def test_parquet_defects(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["a", None, "c"], "number": [1, 2, 3]}), path)
    with pytest.raises(UserError, match=r"a\.parquet:2: column 'text' is null"):
        read(path)
    assert texts(path, on_error="skip") == ["a", "c"]
    with pytest.raises(UserError, match=r"no column 'body'.*text, number"):
        read(path, text_field="body")
    with pytest.raises(UserError, match=r"column 'number' is not text.*int64"):
        read(path, text_field="number")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"a\.parquet: not a readable Parquet file"):
        read(path, on_error="skip")


def test_bom_crlf_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"text": "b"}')
    assert read(path) == [("a", f"{path}:1"), ("b", f"{path}:4")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "\xff"}', "not UTF-8: invalid start byte"),
        (b'{"text": "cut', "not JSON"),
        (b'["a"]', "expected a JSON object, got an array"),
        (b"[", "one object a line, not an array"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'{"body": "a"}', r"field 'text' is missing \(fields: body; --text-field"),
        (b'{"text": null}', "must be a string, got null"),
        (b'{"text": 5}', "must be a string, got a number"),
        (b'{"text": ["a"]}', "must be a string, got an array"),
        (b'{"text": "\\ud800"}', r"lone surrogate \\ud800 at 0"),
    ],
)
def test_bad_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    with pytest.raises(UserError, match=rf"a\.jsonl:2: .*{message}") as error:
        read(path)
    assert error.value.exit_code == 2
    faults = Faults("skip")
    [source] = expand_inputs([path])
    assert [text for text, _ in read_documents(source, "text", faults)] == ["before", "after"]
    assert faults.skipped == 1 and faults.examples[0].startswith(f"{path}:2: ")


def test_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\\ud83d\\ude00"}\n')
    assert texts(path) == ["\U0001f600"]


def test_bad_utf8_in_text_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\nfine\nbad \xe9t\xe9\n")
    with pytest.raises(UserError, match=r"a\.txt:3: not UTF-8.*0xe9"):
        read(path)
    assert texts(path, on_error="skip") == []


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_truncated_archive_is_never_a_short_file(tmp_path: Path, suffix: str, on_error: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    packed = PACKERS[suffix](jsonl([f"document {i * 7919 % 10007}" for i in range(2000)]))
    for length in (0, 1, 5, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:length])
        with pytest.raises(UserError, match=r"a\.jsonl\.\w+: the compressed file is (truncated|damaged)"):
            read(path, on_error=on_error)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_damaged_archive(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    packed = PACKERS[suffix](bytes(range(65, 91)) * 400)
    path.write_bytes(b"not an archive at all")
    with pytest.raises(UserError, match="damaged"):
        read(path)
    path.write_bytes(packed + b"garbage after the end")
    with pytest.raises(UserError, match=r"damaged|truncated"):
        read(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_several_archives_in_one_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"".join(PACKERS[suffix](jsonl([text])) for text in TEXTS))
    assert texts(path) == TEXTS


def test_zeros_after_and_between_xz_streams(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    zeros = bytes(4)
    path.write_bytes(lzma.compress(jsonl(TEXTS[:1])) + zeros * 3 + lzma.compress(jsonl(TEXTS[1:])) + zeros)
    assert texts(path) == TEXTS


def test_zstd_skippable_frame_and_long_stream(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    many = [f"{i} " * (i % 50) for i in range(20_000)]
    path.write_bytes(zstd(jsonl(many[:9000])) + b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc" + zstd(jsonl(many[9000:])))
    assert texts(path) == many


def test_huge_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["x" * 8_000_000, "y"]))
    assert [len(text) for text in texts(path)] == [8_000_000, 1]


def test_directory_order_hidden_and_unknown_files(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.jsonl", "a.txt", "c/d/e.TXT.gz", "._b.txt", ".hidden/x.txt", "notes.md", "a/._z.jsonl"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    found = [source.path for source in expand_inputs([tmp_path])]
    assert found == [tmp_path / name for name in ["a/z.jsonl", "a.txt", "b.txt", "c/d/e.TXT.gz"]]
    without = [source.path for source in expand_inputs([tmp_path], exclude=(tmp_path / "a").resolve())]
    assert without == [tmp_path / name for name in ["a.txt", "b.txt", "c/d/e.TXT.gz"]]


def test_input_errors(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(UserError, match="no input"):
        expand_inputs([])
    with pytest.raises(UserError, match=r"unknown format \(expected txt, jsonl.*got \.md\)"):
        expand_inputs([tmp_path / "notes.md"])
    with pytest.raises(UserError, match=r"no such file.*nearest: corpus\.txt"):
        expand_inputs([tmp_path / "corpis.txt"])
    with pytest.raises(UserError, match=r"no such file.*nearest: sotu_1790_1899"):
        expand_inputs(["sotu_1790_1989"])
    with pytest.raises(UserError, match="no such file"):
        expand_inputs(["x" * 5000])
    with pytest.raises(UserError, match="named twice"):
        expand_inputs([tmp_path / "corpus.txt", tmp_path / ".." / tmp_path.name / "corpus.txt"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="holds no data files"):
        expand_inputs([empty])
    with pytest.raises(UserError, match="on_error"):
        Faults("ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["with space", "[x]", "ü漢字", "-dash", "n" * 250])
def test_odd_paths(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / folder / "[a] ü.txt"
    path.parent.mkdir()
    path.write_text("text")
    assert read(path) == [("text", f"{path}:1")]
    assert texts(path.parent) == ["text"]
    monkeypatch.chdir(path.parent)
    assert texts("[a] ü.txt") == texts("./") == ["text"]


def test_missing_packages_name_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.split(".")[0] in ("pyarrow", "zstandard", "datasets", "compression"):
            raise ImportError(f"No module named {name!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    for name, extra in (("a.parquet", "formats"), ("a.txt.zst", "formats")):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UserError, match=rf"pip install 'boost-llm\[{extra}\]'"):
            read(tmp_path / name)
    with pytest.raises(UserError, match=r"hf:some/name: .*pip install 'boost-llm\[hf\]'"):
        read("hf:some/name")


def hub_modules(monkeypatch: pytest.MonkeyPatch, rows: Any, version: str = "4.1.0") -> list[Any]:
    """Puts stand-ins for the two packages in place; returns the list of calls made to them."""
    calls: list[Any] = []

    def load_dataset(name: str, config: str | None, **options: Any) -> Any:
        calls.append((name, config, options))
        return rows()

    class HfApi:
        def dataset_info(self, name: str) -> Any:
            return types.SimpleNamespace(sha="c0ffee")

    datasets = types.ModuleType("datasets")
    datasets.__dict__.update(__version__=version, load_dataset=load_dataset)
    hub = types.ModuleType("huggingface_hub")
    hub.__dict__.update(HfApi=HfApi)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return calls


def test_hub_streams_a_pinned_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub_modules(monkeypatch, lambda: [{"text": "a"}, {"text": None}, {"text": "c"}])
    assert read("hf:org/name:en", on_error="skip") == [("a", "hf:org/name:en:1"), ("c", "hf:org/name:en:3")]
    assert calls == [("org/name", "en", {"split": "train", "streaming": True, "revision": "c0ffee"})]
    with pytest.raises(UserError, match="hf:org/name:2: field 'text' must be a string, got null"):
        read("hf:org/name")


def test_hub_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        yield {"text": "a"}
        raise builtins.ConnectionError("reset by peer")

    hub_modules(monkeypatch, broken)
    with pytest.raises(EnvironmentFailure, match="broke off: reset by peer"):
        read("hf:org/name")
    hub_modules(monkeypatch, broken, version="2.19.0")
    with pytest.raises(UserError, match=r"too old.*4 or newer"):
        read("hf:org/name")
