"""Parquet: one column is the text, a row is a document. Needs pyarrow."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from boost.data.formats.extras import optional_import
from boost.data.formats.faults import Faults
from boost.errors import UserError

_ROWS_PER_BATCH = 1024


def read_parquet(
    stream: IO[bytes], compression: str, label: str, text_field: str, faults: Faults
) -> Iterator[tuple[str, str]]:
    """Yields (text, "file:row"), rows counted from 1. Nulls are reported; a missing or non-string column stops."""
    arrow = optional_import("pyarrow", "formats", label)
    parquet = optional_import("pyarrow.parquet", "formats", label)
    with tempfile.TemporaryFile() as unpacked:
        if compression:
            shutil.copyfileobj(stream, unpacked)  # Parquet starts reading at the end of the file
            unpacked.seek(0)
        try:
            file = parquet.ParquetFile(unpacked if compression else stream)
            _check_column(arrow, file.schema_arrow, label, text_field)
            row = 0
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=[text_field]):
                for scalar in batch.column(0):
                    row += 1
                    text = _text(scalar, f"{label}:{row}", text_field, faults)
                    if text is not None:
                        yield text, f"{label}:{row}"
        except (arrow.ArrowException, OSError) as error:
            raise UserError(label, f"not a readable Parquet file: {error}") from error


def _check_column(arrow: Any, schema: Any, label: str, text_field: str) -> None:
    if text_field not in schema.names:
        raise UserError(
            label, f"no column {text_field!r}", got=", ".join(schema.names[:8]), hint="--text-field names another"
        )
    kind = schema.field(text_field).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)):
        raise UserError(label, f"column {text_field!r} is not text", expected="string", got=kind)


def _text(scalar: Any, where: str, text_field: str, faults: Faults) -> str | None:
    try:
        value: str | None = scalar.as_py()
    except UnicodeDecodeError as error:
        faults.report(where, f"column {text_field!r} is not UTF-8: {error.reason}")
        return None
    if value is None:
        faults.report(where, f"column {text_field!r} is null")
    return value
