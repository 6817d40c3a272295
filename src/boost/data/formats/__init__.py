"""Readers: every input format as a stream of (text, "file:line")."""

from __future__ import annotations

from collections.abc import Iterator

from boost.data.formats.compression import open_stream
from boost.data.formats.faults import Faults, OnError
from boost.data.formats.hub import read_hub
from boost.data.formats.inputs import Source, expand_inputs
from boost.data.formats.jsonl import read_jsonl
from boost.data.formats.parquet import read_parquet
from boost.data.formats.text import read_text

__all__ = ["Faults", "OnError", "Source", "expand_inputs", "read_documents"]


def read_documents(source: Source, text_field: str, faults: Faults) -> Iterator[tuple[str, str]]:
    """Yields (text, "file:line") for each record of one source, empty texts included.

    Args:
        source: from `expand_inputs`.
        text_field: the JSON field or Parquet column that holds the text; plain text has none.
        faults: what to do with a bad record.

    Raises:
        UserError: a bad record under "stop"; always for a file that is damaged or cannot be read.
        EnvironmentFailure: the hub is not reachable.
    """
    if source.path is None:
        yield from read_hub(source.label, source.revision, text_field, faults)
        return
    with open_stream(source.path, source.compression, source.label) as stream:
        if source.kind == "text":
            yield from read_text(stream, source.label, faults)
        elif source.kind == "jsonl":
            yield from read_jsonl(stream, source.label, text_field, faults)
        else:
            yield from read_parquet(stream, source.compression, source.label, text_field, faults)
