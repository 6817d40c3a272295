"""Turns the documents of all sources into token ids, a batch at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from boost.data.formats import Faults, Source, read_documents

# A batch is full at either limit: many short documents, or a few long ones.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4 * 1024 * 1024


@dataclass(frozen=True)
class EncodedDocument:
    """One document.

    Attributes:
        ids: uint32 [tokens], begin and end tokens included; empty for a document without text.
        text_bytes: UTF-8 bytes of the text.
        text_hash: a number in [0, 1) that depends on the text alone.
        where: "file:line".
    """

    ids: npt.NDArray[np.uint32]
    text_bytes: int
    text_hash: float
    where: str


def encode_sources(
    sources: Iterable[Source],
    tokenizer: Tokenizer,
    text_field: str,
    faults: Faults,
    before: list[int],
    after: list[int],
) -> Iterator[EncodedDocument]:
    """Encodes every document between the ids `before` and `after`.

    The tokenizer's own post-processor is left out (it may add the same tokens again), and a special token spelled out
    in a text is text: only a real document end is one.
    """
    tokenizer.encode_special_tokens = True
    for batch in _batches(pair for source in sources for pair in read_documents(source, text_field, faults)):
        encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        for (text, where), encoding in zip(batch, encodings, strict=True):
            ids = encoding.ids
            data = text.encode("utf-8")
            # Text without any token (blank, or dropped by the normaliser) is no document.
            whole = before + ids + after if ids and text.strip() else []
            yield EncodedDocument(np.array(whole, dtype=np.uint32), len(data), _hash(data), where)


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    characters = 0
    for text, where in documents:
        batch.append((text, where))
        characters += len(text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _hash(data: bytes) -> float:
    # 53 bits: what a float holds exactly, so that the result stays below 1.
    return (int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 11) / 2**53
