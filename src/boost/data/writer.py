"""Writes one split: token ids and document boundaries, as they come, in bounded memory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boost.data.sidefile import FileRecord, SplitRecord, token_dtype
from boost.errors import UserError


class HashedFile:
    """A new file whose size and SHA-256 are known when it is closed, and whose bytes are on the disk by then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> None:
        """Appends."""
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def finish(self) -> FileRecord:
        """Flushes to the disk, closes and describes the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return FileRecord(name=self._path.name, size=self._size, sha256=self._hash.hexdigest())

    def close(self) -> None:
        """Lets go of the file without finishing it."""
        self._file.close()


class SplitWriter:
    """Appends documents to `NAME.bin` (ids, little-endian uint16 or uint32) and `NAME.documents.bin` (int64 offsets).

    Args:
        directory: where the files go.
        name: "train" or "validation".
        vocab_size: ids must be below it; decides the width.
    """

    def __init__(self, directory: Path, name: str, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._tokens = HashedFile(directory / f"{name}.bin")
        self._documents = HashedFile(directory / f"{name}.documents.bin")
        self.documents = self.tokens = self.bytes = self.longest = 0

    def add(self, ids: npt.NDArray[Any], text_bytes: int, where: str) -> None:
        """Appends one document.

        Args:
            ids: integers [tokens], at least one.
            text_bytes: UTF-8 bytes of the document's text.
            where: "file:line", for messages.

        Raises:
            UserError: an id lies outside the vocabulary.
        """
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            raise UserError(
                where,
                "token id outside the vocabulary",
                expected=f"0 to {self._vocab_size - 1}",
                got=low if low < 0 else high,
                hint="the tokenizer file contradicts itself",
            )
        self._documents.write(np.int64(self.tokens).astype("<i8").tobytes())
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self.documents += 1
        self.tokens += len(ids)
        self.bytes += text_bytes
        self.longest = max(self.longest, len(ids))

    def finish(self) -> SplitRecord:
        """Writes the end offset, flushes both files to the disk and describes them."""
        self._documents.write(np.int64(self.tokens).astype("<i8").tobytes())
        return SplitRecord(
            documents=self.documents,
            tokens=self.tokens,
            bytes=self.bytes,
            max_document_tokens=self.longest,
            token_file=self._tokens.finish(),
            document_file=self._documents.finish(),
        )

    def close(self) -> None:
        """Lets go of the files without finishing them."""
        self._tokens.close()
        self._documents.close()
