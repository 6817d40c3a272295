"""Trains a byte-level BPE on the same inputs that `prepare` takes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from boost.data.formats import Faults, OnError, Source, expand_inputs, read_documents
from boost.errors import EnvironmentFailure, UserError

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
SMALLEST = len(SPECIAL_TOKENS) + 256  # a byte-level vocabulary holds every byte


@dataclass(frozen=True)
class TrainedTokenizer:
    """What `train_tokenizer` wrote.

    Attributes:
        path: the file.
        vocab_size: entries; fewer than asked for where the text has no more pairs to merge.
        asked: the `vocab_size` asked for.
        documents: how many it was trained on.
        skipped: bad records left out.
    """

    path: Path
    vocab_size: int
    asked: int
    documents: int
    skipped: int

    def __str__(self) -> str:
        skipped = f", {self.skipped} bad records skipped" if self.skipped else ""
        fewer = f" (not {self.asked}: no more pairs to merge)" if self.vocab_size < self.asked else ""
        return f"{self.path}: {self.vocab_size} entries{fewer}, trained on {self.documents} documents{skipped}"


def train_tokenizer(
    inputs: Sequence[str | Path],
    vocab_size: int,
    out: str | Path,
    *,
    text_field: str = "text",
    on_error: OnError = "stop",
) -> TrainedTokenizer:
    """Trains a byte-level BPE with `<s>`, `</s>`, `<pad>` as ids 0, 1, 2 and writes it as a `tokenizer.json`.

    Args:
        inputs: files, directories, shipped names or `hf:` names.
        vocab_size: entries, special tokens and the 256 bytes included.
        out: the file to write; must not exist.
        text_field, on_error: as in `prepare`.

    Raises:
        UserError: an input or argument is wrong, there is no text, or `out` exists.
        EnvironmentFailure: `out` cannot be written.
    """
    out = Path(out)
    if vocab_size < SMALLEST:
        raise UserError(
            "--vocab-size", "too small for a byte-level BPE", expected=f"at least {SMALLEST}", got=vocab_size
        )
    if out.exists():
        raise UserError(str(out), "exists already", hint="name another --out or delete it")
    faults = Faults(on_error)
    texts = _Texts(expand_inputs(inputs), text_field, faults)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    if texts.documents == 0:
        raise UserError("INPUT", "the inputs hold no text")
    _write(out, tokenizer.to_str(pretty=True))
    return TrainedTokenizer(out, tokenizer.get_vocab_size(), vocab_size, texts.documents, faults.skipped)


class _Texts:
    """All texts of the sources, counted as they pass."""

    def __init__(self, sources: list[Source], text_field: str, faults: Faults) -> None:
        self.sources, self.text_field, self.faults, self.documents = sources, text_field, faults, 0

    def __iter__(self) -> Iterator[str]:
        for source in self.sources:
            for text, _ in read_documents(source, self.text_field, self.faults):
                if text.strip():
                    self.documents += 1
                    yield text


def _write(out: Path, text: str) -> None:
    """Writes beside `out` and renames, so that no half-written tokenizer is ever found there."""
    temporary = out.parent / f".boost-{secrets.token_hex(6)}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EnvironmentFailure(str(out), f"cannot write: {error.strerror or error}") from error
