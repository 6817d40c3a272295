"""JSON lines: a line is one object, and one field of it is the document."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from boost.data.formats.faults import Faults


def read_jsonl(stream: IO[bytes], label: str, text_field: str, faults: Faults) -> Iterator[tuple[str, str]]:
    """Yields (text, "file:line"); blank lines are passed over, bad ones reported."""
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        line = line.strip(b" \t\r\n")
        if not line:
            continue
        where = f"{label}:{number}"
        try:
            yield _text(line, text_field), where
        except BadRecord as error:
            faults.report(where, str(error))


class BadRecord(Exception):
    """A record without usable text; the message says why."""


def _text(line: bytes, text_field: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8: {error.reason} (byte 0x{line[error.start]:02x} at {error.start})") from error
    except (ValueError, RecursionError) as error:
        hint = "; a file holds one object a line, not an array" if line.startswith(b"[") else ""
        raise BadRecord(f"not JSON: {error}{hint}") from error
    return text_of(record, text_field)


def text_of(record: Any, text_field: str) -> str:
    """The text field of a record. Raises BadRecord where it is missing, no string, or nothing that UTF-8 can hold."""
    if not isinstance(record, dict):
        raise BadRecord(f"expected a JSON object, got {_kind(record)}")
    if text_field not in record:
        present = ", ".join(sorted(record)[:8]) or "none"
        raise BadRecord(f"field {text_field!r} is missing (fields: {present}; --text-field names another)")
    value = record[text_field]
    if not isinstance(value, str):
        raise BadRecord(f"field {text_field!r} must be a string, got {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can escape half of a surrogate pair; no tokenizer takes it.
        lone = ord(value[error.start])
        raise BadRecord(f"field {text_field!r} holds a lone surrogate \\u{lone:04x} at {error.start}") from error
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
