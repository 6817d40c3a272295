"""Data sets of the Hugging Face hub, streamed through `datasets`, at a pinned revision. Needs the extra `hf`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from boost.data.formats.extras import optional_import
from boost.data.formats.faults import Faults
from boost.data.formats.jsonl import BadRecord, text_of
from boost.errors import EnvironmentFailure, UserError

PREFIX = "hf:"


def pin_revision(label: str) -> str:
    """The commit that `hf:NAME` or `hf:NAME:CONFIG` stands for now.

    Raises:
        UserError: `datasets` is missing, or so old that it may run code found in a data set.
        EnvironmentFailure: the hub does not answer or has no such data set.
    """
    datasets = optional_import("datasets", "hf", label)
    if int(datasets.__version__.split(".")[0]) < 4:
        # Versions before 4 can execute a script that a repository brings along.
        raise UserError(label, "this version of datasets is too old", expected="4 or newer", got=datasets.__version__)
    hub = optional_import("huggingface_hub", "hf", label)
    try:
        return str(hub.HfApi().dataset_info(_name(label)[0]).sha)
    except Exception as error:  # the hub client raises classes of several network libraries
        raise EnvironmentFailure(label, f"cannot reach this data set: {error}") from error


def read_hub(label: str, revision: str, text_field: str, faults: Faults) -> Iterator[tuple[str, str]]:
    """Yields (text, "hf:NAME:row") over the train split, rows counted from 1."""
    datasets = optional_import("datasets", "hf", label)
    name, config = _name(label)
    try:
        rows = datasets.load_dataset(name, config, split="train", streaming=True, revision=revision)
    except Exception as error:
        raise EnvironmentFailure(label, f"cannot open this data set: {error}") from error
    for number, row in enumerate(_guarded(rows, label), 1):
        where = f"{label}:{number}"
        try:
            yield text_of(row, text_field), where
        except BadRecord as error:
            faults.report(where, str(error))


def _guarded(rows: Any, label: str) -> Iterator[dict[str, Any]]:
    """Rows, with a lost connection turned into an error worth a retry."""
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise EnvironmentFailure(label, f"the data set broke off: {error}") from error
        yield row


def _name(label: str) -> tuple[str, str | None]:
    name, _, config = label.removeprefix(PREFIX).partition(":")
    if not name:
        raise UserError(label, "no data set is named", expected="hf:NAME or hf:NAME:CONFIG")
    return name, config or None
