"""Plain text: a file is one document."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import IO

from boost.data.formats.faults import Faults


def read_text(stream: IO[bytes], label: str, faults: Faults) -> Iterator[tuple[str, str]]:
    """Yields (text, "file:1"), with line ends as "\\n": how a file ends its lines is no part of its text."""
    data = stream.read().removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        faults.report(f"{label}:{line}", f"not UTF-8: {error.reason} (byte 0x{data[error.start]:02x})")
        return
    yield text.replace("\r\n", "\n"), f"{label}:1"
