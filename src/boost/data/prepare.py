"""From text to a tokenised dataset on disk: all of it or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from boost.data import sidefile
from boost.data import tokenizer as tokenizers_
from boost.data.dataset import Dataset
from boost.data.encode import EncodedDocument, encode_sources
from boost.data.formats import Faults, OnError, Source, expand_inputs
from boost.data.sidefile import Options, SideFile, SourceRecord, SplitRecord
from boost.data.writer import HashedFile, SplitWriter
from boost.errors import EnvironmentFailure, UserError

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Summary:
    """What a dataset holds; `str()` of it is what the command prints.

    Attributes:
        out: the dataset's directory.
        reused: it was there already, made from the same inputs and options.
        side_file: all counts, ids and hashes.
        skipped_examples: the first few bad records left out in this run.
    """

    out: Path
    reused: bool
    side_file: SideFile
    skipped_examples: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        side = self.side_file
        lines = [f"{self.out}: " + ("up to date, same inputs and options; nothing to do" if self.reused else "written")]
        for name, split in (("train", side.train), ("validation", side.validation)):
            if split is not None:
                lines.append(
                    f"  {name}: {split.documents} documents, {split.tokens} tokens, {split.bytes} bytes of text, "
                    f"longest document {split.max_document_tokens} tokens"
                )
        added = [
            f"{what} id {id_} added to each document" if on else f"no {what} added"
            for what, id_, on in (
                ("begin", side.bos_id, side.options.bos),
                ("end", side.eos_id, side.options.eos),
            )
        ]
        lines.append(f"  vocabulary: {side.vocab_size}, stored as {side.dtype}; {', '.join(added)}")
        if side.empty_documents:
            lines.append(f"  empty documents left out: {side.empty_documents}")
        if side.skipped_records:
            lines.append(f"  bad records skipped: {side.skipped_records}")
            lines += [f"    {example}" for example in self.skipped_examples]
        return "\n".join(lines)


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    tokenizer: str | Path,
    *,
    text_field: str = "text",
    validation_last: int = 0,
    validation_fraction: float = 0.0,
    bos: bool = False,
    eos: bool = True,
    on_error: OnError = "stop",
    progress: Progress | None = None,
) -> Summary:
    """Tokenises documents into the directory `out`, which appears complete or not at all.

    Memory holds one batch of documents, and the last `validation_last` documents as ids.

    Args:
        inputs: files, directories, shipped names (`sotu_1790_1899`) or `hf:` names, in this order.
        out: a directory that is new, empty, or the result of the same call.
        tokenizer: a shipped name (`bpe4096`), a `tokenizer.json`, or a directory that holds one.
        text_field: the JSON field or Parquet column that holds the text.
        validation_last: so many documents at the end become the validation split.
        validation_fraction: or about this share of them, chosen by a hash of the text (equal texts stay together).
        bos, eos: put exactly one begin or end token around each document.
        on_error: stop at a bad record, or skip and count it.
        progress: called after each document with the documents and tokens so far.

    Raises:
        UserError: an input, option or the place is wrong.
        EnvironmentFailure: the dataset cannot be written (disk), or the hub does not answer.
    """
    _check_options(validation_last, validation_fraction)
    faults = Faults(on_error)
    options = Options(
        text_field=text_field,
        validation_last=validation_last,
        validation_fraction=float(validation_fraction),
        bos=bos,
        eos=eos,
        on_error=on_error,
    )
    loaded, tokenizer_bytes = tokenizers_.read_tokenizer(tokenizer)
    ends = tokenizers_.special_ids(loaded)
    before = [_required(ends.bos, "begin", tokenizers_.BOS_NAMES, tokenizer, "leave --bos out")] if bos else []
    after = [_required(ends.eos, "end", tokenizers_.EOS_NAMES, tokenizer, "pass --no-eos")] if eos else []

    out = Path(os.path.realpath(out))
    sources = expand_inputs(inputs, exclude=out)
    records = [_record(source) for source in sources]
    key = _key(sources, records, options, tokenizers_.tokenizer_hash(tokenizer_bytes))
    existing = _existing(out, key)
    if existing is not None:
        return Summary(out, reused=True, side_file=existing)

    documents = encode_sources(sources, loaded, text_field, faults, before, after)
    with _appearing(out) as directory:
        vocab_size = tokenizers_.vocabulary_size(loaded)
        train, validation, empty = _write_splits(directory, documents, vocab_size, options, progress)
        copy = HashedFile(directory / tokenizers_.FILE_NAME)
        copy.write(tokenizer_bytes)
        side = SideFile(
            key=key,
            tokenizer=copy.finish(),
            vocab_size=vocab_size,
            dtype=sidefile.token_dtype(vocab_size),
            bos_id=ends.bos,
            eos_id=ends.eos,
            train=train,
            validation=validation,
            empty_documents=empty,
            skipped_records=faults.skipped,
            options=options,
            sources=records,
        )
        description = HashedFile(directory / sidefile.NAME)
        description.write(side.to_json().encode("utf-8"))
        description.finish()
    return Summary(out, reused=False, side_file=side, skipped_examples=faults.examples)


def _check_options(validation_last: int, validation_fraction: float) -> None:
    if validation_last < 0:
        raise UserError("--validation-last", "negative", expected="0 or more", got=validation_last)
    if not 0 <= validation_fraction < 1:
        raise UserError("--validation-fraction", "out of range", expected="0 <= fraction < 1", got=validation_fraction)
    if validation_last and validation_fraction:
        raise UserError("--validation-fraction", "excludes --validation-last", hint="give one of the two")


def _required(id_: int | None, what: str, names: Sequence[str], tokenizer: str | Path, remedy: str) -> int:
    if id_ is None:
        raise UserError(
            str(tokenizer),
            f"the tokenizer has no {what} token",
            expected=f"one of {' '.join(names)}",
            hint=f"{remedy} or take another tokenizer",
        )
    return id_


def _record(source: Source) -> SourceRecord:
    size, digest = source.digest()
    return SourceRecord(name=source.label, size=size, sha256=digest)


def _key(sources: list[Source], records: list[SourceRecord], options: Options, tokenizer_hash: str) -> str:
    """What decides the content: not where the inputs lie, but their bytes and how they are read."""
    content = {
        "version": sidefile.VERSION,
        "tokenizer": tokenizer_hash,
        "options": options.model_dump(),
        "inputs": [[s.kind, s.compression, r.sha256] for s, r in zip(sources, records, strict=True)],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _existing(out: Path, key: str) -> SideFile | None:
    """The side file of an up-to-date dataset at `out`, None where there is room for a new one, else an error."""
    if not os.path.exists(out):
        return None
    if not out.is_dir():
        raise UserError(str(out), "exists and is not a directory", hint="name another --out")
    try:
        if not any(out.iterdir()):
            return None
    except OSError as error:
        raise UserError(str(out), f"cannot read: {error.strerror or error}") from error
    if not (out / sidefile.NAME).is_file():
        raise UserError(str(out), "the directory is not empty and holds no dataset", hint="name another --out")
    side = sidefile.read_side_file(out)
    if side.key != key:
        raise UserError(
            str(out),
            "holds a dataset made from other inputs, options or another tokenizer",
            hint="name another --out, or delete this one first",
        )
    Dataset.open(out)
    return side


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A hidden directory beside `out` that takes its name in one step at the end, or vanishes on any failure."""
    directory = out.parent / f".boost-{secrets.token_hex(6)}"  # short: `out` may have the longest name there can be
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir()
        yield directory
        _sync(directory)
        directory.rename(out)
        _sync(out.parent)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise EnvironmentFailure(str(out), f"cannot write the dataset: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_splits(
    directory: Path,
    documents: Iterator[EncodedDocument],
    vocab_size: int,
    options: Options,
    progress: Progress | None,
) -> tuple[SplitRecord, SplitRecord | None, int]:
    """Writes both splits; returns their records (None for a validation split not asked for) and the empty documents."""
    train = SplitWriter(directory, "train", vocab_size)
    validation = None
    if options.validation_last or options.validation_fraction:
        validation = SplitWriter(directory, "validation", vocab_size)
    held_back: deque[EncodedDocument] = deque()
    seen = tokens = empty = 0
    try:
        for document in documents:
            if len(document.ids) == 0:
                empty += 1
                continue
            seen += 1
            tokens += len(document.ids)
            if document.text_hash < options.validation_fraction:
                assert validation is not None
                _add(validation, document)
            else:
                # Whether a document is among the last ones shows only when as many have followed it.
                held_back.append(document)
                if len(held_back) > options.validation_last:
                    _add(train, held_back.popleft())
            if progress is not None:
                progress(seen, tokens)
        for document in held_back:
            assert validation is not None
            _add(validation, document)
        _check_splits(seen, empty, train, validation, options)
        return train.finish(), validation.finish() if validation is not None else None, empty
    finally:
        train.close()
        if validation is not None:
            validation.close()


def _add(split: SplitWriter, document: EncodedDocument) -> None:
    split.add(document.ids, document.text_bytes, document.where)


def _check_splits(seen: int, empty: int, train: SplitWriter, validation: SplitWriter | None, options: Options) -> None:
    if seen == 0:
        raise UserError("INPUT", "the inputs hold no text", got=f"{empty} empty documents")
    if options.validation_last >= seen:
        raise UserError(
            "--validation-last",
            "leaves no document for training",
            expected=f"less than {seen} documents",
            got=options.validation_last,
            hint="a text file is one document, a line of JSONL too; hold out fewer, or split the text",
        )
    if train.documents == 0 or (validation is not None and validation.documents == 0):
        raise UserError(
            "--validation-fraction",
            f"{options.validation_fraction} of {seen} documents leaves a split empty",
            hint="use --validation-last with so few documents",
        )
