"""Opens plain and compressed files as binary streams in which a truncated archive is an error, never a short file."""

from __future__ import annotations

import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from boost.data.formats.extras import optional_import
from boost.errors import UserError

SUFFIXES = (".gz", ".xz", ".zst")
_CHUNK_BYTES = 1 << 20


@contextmanager
def open_stream(path: Path, compression: str, label: str) -> Iterator[IO[bytes]]:
    """Opens a file for reading; errors of the file and of its compression become UserErrors naming `label`.

    Args:
        path: the file.
        compression: one of `SUFFIXES`, or "" for a plain file.
        label: the file's name in messages.
    """
    try:
        with _open(path, compression, label) as stream:
            yield stream
    except EOFError as error:
        raise UserError(label, "the compressed file is truncated", hint="fetch or compress it again") from error
    except (gzip.BadGzipFile, zlib.error, _Damaged) as error:
        raise UserError(label, f"the compressed file is damaged: {error}", hint="fetch or compress it again") from error
    except OSError as error:
        raise UserError(label, f"cannot read: {error.strerror or error}") from error


def _open(path: Path, compression: str, label: str) -> IO[bytes]:
    if compression and path.stat().st_size == 0:
        raise EOFError  # gzip reads an empty file as an empty stream; no archive is that short
    if compression == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if compression == ".xz":
        return _frames(path, lzma.LZMADecompressor, lzma.LZMAError)
    if compression == ".zst":
        return _frames(path, *_zstd(label))
    return path.open("rb")


class _Damaged(Exception):
    """One name for the libraries' error classes."""


def _frames(path: Path, new_frame: Callable[[], Any], error: type[Exception]) -> IO[bytes]:
    return io.BufferedReader(_FrameStream(path, new_frame, error), _CHUNK_BYTES)


class _FrameStream(io.RawIOBase):
    """Decompresses frame after frame (an .xz calls them streams), to the very end of the file.

    The libraries' own readers may end early without an error: lzma's at a damaged second frame, zstandard's at a
    truncated one.
    """

    def __init__(self, path: Path, new_frame: Callable[[], Any], error: type[Exception]) -> None:
        self._file = path.open("rb")
        self._new_frame, self._error = new_frame, error
        self._first = True
        self._frame: Any = None  # None between frames
        self._ahead = b""  # compressed bytes read beyond the end of a frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._advance():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _advance(self) -> bool:
        """Decompresses one more chunk; False at the end of the file."""
        chunk = self._ahead or self._file.read(_CHUNK_BYTES)
        self._ahead = b""
        if not chunk:
            if self._frame is not None:
                raise EOFError
            return False
        if self._frame is None:
            if not self._first:
                chunk = chunk.lstrip(b"\0")  # .xz allows zeros between and after frames; no frame begins with one
                if not chunk:
                    return True
            self._frame, self._first = self._new_frame(), False
        try:
            self._ready = memoryview(self._frame.decompress(chunk))
        except self._error as error:
            raise _Damaged(str(error)) from error
        if self._frame.eof:
            self._ahead, self._frame = self._frame.unused_data, None
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def _zstd(label: str) -> tuple[Callable[[], Any], type[Exception]]:
    """(a function that starts a frame, the error class): Python's own where it has one (3.14), else the package."""
    try:
        own: Any = importlib.import_module("compression.zstd")
        return own.ZstdDecompressor, own.ZstdError
    except ImportError:
        pass
    package = optional_import("zstandard", "formats", label)
    decompressor = package.ZstdDecompressor(max_window_size=1 << 31)  # what `zstd --long=31` writes
    return decompressor.decompressobj, package.ZstdError
