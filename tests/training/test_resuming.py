"""What may change between saving and resuming: the documented table, field by field, against the code."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from boost.config import TrainConfig
from boost.errors import UserError
from boost.training import state

CHECKPOINTS = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer")  # it prints values that no field takes

BEFORE = TrainConfig.load("quickstart", ["train.precision=fp32"])
FIELDS = [f"{section}.{name}" for section, part in BEFORE for name in type(part).model_fields]


def documented() -> dict[str, str]:
    """Every field's second cell in the first row that has it."""
    section = CHECKPOINTS.split("## What may change")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for cells, outcome in re.findall(r"^\| (`[^|]*`) \| (\w+) \|", section, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cells):
            matching = [field for field in FIELDS if field == name or name == f"{field.split('.')[0]}.*"]
            assert matching, f"{name} is no field"
            for field in matching:
                found.setdefault(field, outcome)
    return found


def resume(monkeypatch: pytest.MonkeyPatch, field: str, value: Any, fingerprint: str = "x") -> None:
    monkeypatch.setattr(state, "saved_config", lambda checkpoint: BEFORE)
    section, _, name = field.partition(".")
    part = getattr(BEFORE, section).model_copy(update={name: value})
    checkpoint: Any = SimpleNamespace(path="step-1", state={"data_fingerprint": "x"})
    state.check_resumable(checkpoint, BEFORE.model_copy(update={section: part}), fingerprint)


def test_the_table_has_every_field() -> None:
    assert sorted(documented()) == sorted(FIELDS)
    assert {"refused", "logged", "silent"} == set(documented().values())


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_does_what_the_table_says(
    field: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    outcome = documented()[field]
    if outcome == "refused":
        with pytest.raises(UserError, match=rf"^{re.escape(field)}: differs .*got changed"):
            resume(monkeypatch, field, "changed")
    else:
        resume(monkeypatch, field, "changed")
        assert (f"resuming with {field} = changed" in caplog.text) == (outcome == "logged")


def test_the_exceptions_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    resume(monkeypatch, "train.precision", "bf16")
    with pytest.raises(UserError, match=r"^train\.precision: differs"):
        resume(monkeypatch, "train.precision", "fp64")
    with pytest.raises(UserError, match=r"^data\.path: the dataset is not the one"):
        resume(monkeypatch, "data.path", "elsewhere", fingerprint="y")
