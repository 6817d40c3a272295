"""Tokenizers: loading one without running anything that comes with it, and finding its special ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from boost.data.corpora import TOKENIZERS, resolve
from boost.errors import UserError

FILE_NAME = "tokenizer.json"
SIZE_LIMIT = 200 * 1024 * 1024  # bytes

# First match wins. Some tokenizers have one token for both ends; it comes last for the beginning.
EOS_NAMES = ("</s>", "<|endoftext|>", "<eos>", "[SEP]", "<|end_of_text|>")
BOS_NAMES = ("<s>", "<|startoftext|>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|endoftext|>")


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokens that begin and end a document; None where the tokenizer has none of the usual names."""

    bos: int | None
    eos: int | None


def tokenizer_file(name_or_path: str | Path) -> Path:
    """The `tokenizer.json` that a shipped name, a file or a directory stands for.

    Raises:
        UserError: there is none, or it is larger than `SIZE_LIMIT`.
    """
    path = resolve(name_or_path, TOKENIZERS, "tokenizer")
    if path.is_dir():
        path = path / FILE_NAME
    if not path.is_file():
        raise UserError(str(path), "no such tokenizer file", expected=f"a {FILE_NAME} or a directory that holds one")
    size = path.stat().st_size
    if size > SIZE_LIMIT:
        raise UserError(str(path), "too large for a tokenizer", expected=f"at most {SIZE_LIMIT} bytes", got=size)
    return path


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Loads a tokenizer from a local `tokenizer.json`: no network, no code from the file's neighbours.

    Truncation, padding and BPE dropout that the file may ask for are switched off: they would cut documents or make
    token ids random.

    Args:
        name_or_path: a shipped name (`bpe4096`), a `tokenizer.json`, or a directory that holds one.

    Raises:
        UserError: there is none, it is too large, or it is not a tokenizer.
    """
    return read_tokenizer(name_or_path)[0]


def read_tokenizer(name_or_path: str | Path) -> tuple[Tokenizer, bytes]:
    """Like `load_tokenizer`, with the bytes of the file that was loaded."""
    path = tokenizer_file(name_or_path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(str(path), f"cannot read: {error.strerror or error}") from error
    return parse_tokenizer(data, path), data


def parse_tokenizer(data: bytes, path: Path) -> Tokenizer:
    """A tokenizer from the bytes of its file, without the truncation, padding and dropout it may ask for.

    Raises:
        UserError: naming the path: it is not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for whatever it does not understand
        raise UserError(
            str(path), f"not a tokenizer: {str(error)[:200]}", hint=f"expected a {FILE_NAME} of the tokenizers library"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
    return tokenizer


def tokenizer_hash(data: bytes) -> str:
    """SHA-256 (hex) of a tokenizer file's bytes."""
    return hashlib.sha256(data).hexdigest()


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """The largest id plus one, which a model's vocabulary must cover (ids may have gaps, so it is not the count)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Finds the begin and end tokens by their conventional names."""
    return SpecialIds(bos=_find(tokenizer, BOS_NAMES), eos=_find(tokenizer, EOS_NAMES))


def _find(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    # Tokens marked special go first: some vocabularies hold "</s>" as the HTML tag.
    special = {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for name in names:
        if name in special:
            return int(special[name])
    for name in names:
        id_ = tokenizer.token_to_id(name)
        if id_ is not None:
            return int(id_)
    return None
