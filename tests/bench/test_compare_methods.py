"""`benchmarks/compare_methods.py`: every run is what the table says it is, and the table is what the runs gave."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import boost
from boost.config import TrainConfig
from boost.data.prepare import prepare

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare_methods.py"
TINY = ["model.hidden_size=32", "model.ffn_size=40", "model.layers=2", "model.heads=2", "model.rank=8"]
TINY += ["train.sequence_length=64", "train.global_batch_size=16"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_methods", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_methods", module)
    spec.loader.exec_module(module)
    return module


def test_the_best_rate_of_each_sweep_trains_with_the_other_seeds(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Dense is best at its lowest rate and CoLA at its highest; three seeds of each; the copy beside an odd run counts
    nowhere."""
    trained = []

    def result(run: Any, steps: int, base: list[str]) -> dict[str, Any]:
        trained.append(run)
        value = 2 + run.seed / 100 + (run.lr if run.method == "dense" else -run.lr)
        seconds = 10.0 if run.method == "dense" else 5.0
        row = {"method": run.method, "lr": run.lr, "seed": run.seed, "bits_per_byte": value, "loss": 3.0}
        return {**row, "seconds": seconds, "steps": steps, "tokens_per_step": 1024}

    monkeypatch.setattr(script, "result", result)
    monkeypatch.setattr(script, "prepared", lambda work: work / "data")
    out, table = tmp_path / "methods.json", tmp_path / "METHODS.md"
    options = ["--methods", "dense", "cola", "--work", str(tmp_path), "--json", str(out), "--table", str(table)]
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", *options])
    script.main()

    summary = json.loads(out.read_text())
    dense, cola = summary["methods"]
    assert (dense["lr"], cola["lr"]) == (1e-3, 4e-3)
    assert dense["sweep"] == pytest.approx({"0.001": 2.001, "0.002": 2.002, "0.004": 2.004})
    assert cola["bits_per_byte_of_each_seed"] == pytest.approx([1.996, 2.006, 2.016])
    assert len(summary["runs"]) == len({(run.method, run.lr, run.seed) for run in trained}) == 2 * (3 + 2)
    assert len(trained) == 10  # an even number, so no copy
    assert summary["tokens"] == 320 * 1024
    assert (dense["parameters"], cola["parameters"]) == (dense["trainable"], cola["trainable"])
    lines = table.read_text().splitlines()
    assert "| dense | 5.31 M | 5.31 M | 0.001 | 2.0110 | 2.0010 to 2.0210 | 1.00 |" in lines
    assert "| cola | 3.36 M | 3.36 M | 0.004 | 2.0060 | 1.9960 to 2.0160 | 0.50 |" in lines

    trained.clear()
    assert (
        len(
            script.two_at_a_time([script.Run("cola", 1e-3, 0, tmp_path)] * 3, lambda run: trained.append(run), tmp_path)
        )
        == 3
    )
    assert len(trained) == 4


def test_a_rate_that_diverges_is_the_worst(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], returncode=4, stdout="", stderr="error: step 3: loss is nan")

    monkeypatch.setattr(subprocess, "run", run)
    row = script.result(script.Run("relora", 1e-3, 0, tmp_path / "run"), 40, [])
    assert row["bits_per_byte"] == math.inf
    assert (row["method"], row["lr"], row["seed"]) == ("relora", 1e-3, 0)


def test_every_method_is_a_configuration(script: ModuleType) -> None:
    """No two methods are the same model and optimiser, and all have the quickstart's size."""
    configurations: list[TrainConfig] = [
        script.configuration(name, method.settings(script.STEPS), []) for name, method in script.METHODS.items()
    ]
    assert len({(each.model, each.optimizer.name) for each in configurations}) == len(script.METHODS) == 7
    assert {(each.model.hidden_size, each.model.layers, each.model.vocab_size) for each in configurations} == {
        (256, 4, 4096)
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """About 3,000 tokens of few words, one of 20 documents held out."""
    draw = random.Random(0)
    words = ["the", "of", "and", "to", "in", "a", "that", "is", "was", "he", "for", "it", "with", "as", "his", "on"]
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": " ".join(draw.choices(words, k=150))}) + "\n" for _ in range(20)))
    prepare([str(source)], tmp_path / "data", "bpe4096", validation_last=1)
    return tmp_path / "data"


@pytest.mark.parametrize("warm_start", [False, True])
def test_a_run_trains(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path, warm_start: bool
) -> None:
    """LORO in one go, or CoLA from a quarter of the steps of CoLA: as many steps and tokens, and far below ln 4096."""
    seen = []

    def here(arguments: list[str]) -> None:
        config = TrainConfig.load(arguments[1], arguments[2:])
        seen.append(config)
        boost.train(config)

    monkeypatch.setattr(script, "boost", here)
    if warm_start:
        again = script.Method(8e-3, lambda steps: {"train.steps": 3 * (steps // 4)}, warm_start={"model.rank": 8})
        monkeypatch.setitem(script.METHODS, "cola", again)
    run = script.Run("cola" if warm_start else "loro", 8e-3, 3, tmp_path / "run")
    row = script.result(run, 40, [f"data.path={data}", *TINY])
    assert (row["steps"], row["tokens_per_step"]) == (40, 16 * 64)
    assert row["loss"] < 6.5  # ln 4096 = 8.3
    assert 0 < row["bits_per_byte"] < 3
    assert row["seconds"] > 0
    *first, last = seen
    assert last.run.dir == str(tmp_path / "run")
    assert {config.train.seed for config in seen} == {3}
    assert [config.data.seed for config in seen] == ([3, 1003] if warm_start else [3])
    if warm_start:
        assert (first[0].train.steps, first[0].optimizer.lr) == (10, 4e-3)
        assert last.run.init_from == first[0].run.dir
    else:
        assert (last.optimizer.name, last.optimizer.exact_every, last.schedule.name) == ("loro", 4, "jagged_cosine")


def test_a_command_that_fails_ends_the_comparison_with_its_message(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="nothing-of-that-name"):
        script.boost(["train", "nothing-of-that-name"])
