"""What `make quickstart` runs, to its end: the model learns real English under BTP over two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"


def commands() -> list[list[str]]:
    """The lines of the target, without the virtual environment's path."""
    lines = MAKEFILE.read_text().split("quickstart: $(VENV)/.installed\n")[1].split("\n\n")[0].splitlines()
    return [line.strip().removeprefix("$(BIN)/boost ").replace('"', "\0").split("\0") for line in lines]


@pytest.mark.slow
def test_the_quickstart_learns_english(tmp_path: Path) -> None:
    """Validation over every token from 1894 on, before the first step and at the end: from about ln(vocab) it falls by
    2.5 nats at least, and ends below 1.85 bits per byte. Then it writes a text that goes on from the prompt."""
    output = ""
    for quoted in commands():
        arguments = [word for i, text in enumerate(quoted) for word in ([text] if i % 2 else text.split())]
        result = subprocess.run(
            [sys.executable, "-m", "boost", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=900
        )
        assert result.returncode == 0, result.stderr
        output = result.stdout
    run = tmp_path / "runs" / "quickstart"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validations = [record for record in records if "val_loss" in record]
    first, last = validations[0], validations[-1]
    assert (first["val_step"], last["val_step"]) == (0, records[-1]["step"])
    assert first["val_loss"] == pytest.approx(8.318, abs=0.2)
    assert first["val_loss"] - last["val_loss"] >= 2.5
    assert last["val_bits_per_byte"] < 1.85
    assert (run / "checkpoints" / f"step-{last['step']}" / "manifest.json").exists()
    assert (run / "plots" / "loss.png").stat().st_size > 5000
    assert output.startswith("Fellow citizens of the Senate")
    assert len(output.split()) > 20
