"""The command line as a user meets it: exit codes, the last line of standard error, signals, kills, locks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from boost.checkpoint.store import latest, open_checkpoint
from tests.processes import boost, ranks_of, records, status, wait_for_step

pytestmark = pytest.mark.slow


def test_interrupted_and_resumed_runs_are_bit_identical(config_file: Path, tmp_path: Path, start: Any) -> None:
    """SIGTERM, then `kill -9` of one rank, each followed by the same command: the losses and the final state of one
    uninterrupted run."""
    whole = boost("train", str(config_file), f"run.dir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    assert status(tmp_path / "whole") == {"status": "done", "step": 200, "exit_code": 0, "cause": ""}

    parts = tmp_path / "parts"
    command = ("train", str(config_file), f"run.dir={parts}")
    process = start(*command)
    wait_for_step(parts, 30, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "stopping after step" in (parts / "log.txt").read_text()
    stopped = status(parts)
    assert stopped["status"] == "preempted"
    assert stopped["exit_code"] == 75
    assert errors.strip().splitlines()[-1].startswith("error: run.dir: stopped by a signal after step")
    assert latest(parts / "checkpoints") == parts / "checkpoints" / f"step-{stopped['step']}"
    assert stopped["step"] < 200

    process = start(*command)
    wait_for_step(parts, stopped["step"] + 30, process)
    ranks = ranks_of(process)
    assert sorted(ranks) == [0, 1]
    began = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert process.returncode == 3, errors
    assert errors.strip().splitlines()[-1].startswith("error: rank 1: killed by SIGKILL")
    assert status(parts)["exit_code"] == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())

    last = boost(*command)
    assert last.returncode == 0, last.stderr
    assert "resuming from" in last.stdout

    def losses(directory: Path) -> list[float]:
        return [record["loss"] for record in records(directory)]

    assert losses(parts) == losses(tmp_path / "whole")
    hashes = [open_checkpoint(run / "checkpoints").state_hash for run in (parts, tmp_path / "whole")]
    assert hashes[0] == hashes[1]


def test_zero_trains_and_resumes(config_file: Path, tmp_path: Path) -> None:
    """Two data-parallel ranks that share everything, and the same two sharing nothing from there on."""
    common = ["parallel.tp=1", "parallel.dp=2", "train.validate_every=2"]
    first = boost("train", str(config_file), *common, "parallel.zero=3", "train.steps=4")
    assert first.returncode == 0, first.stderr
    second = boost("train", str(config_file), *common, "parallel.zero=0", "train.steps=6")
    assert second.returncode == 0, second.stderr
    assert "resuming with parallel.zero = 0 (was 3)" in second.stdout
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_signal_to_one_rank_preempts_all(config_file: Path, tmp_path: Path, start: Any) -> None:
    """With plots and TensorBoard, which keep rank 0 longer than the others."""
    process = start("train", str(config_file), "logging.plots=true", "logging.tensorboard=true")
    wait_for_step(tmp_path / "run", 5, process)
    os.kill(ranks_of(process)[1], signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert (status(tmp_path / "run")["status"], status(tmp_path / "run")["exit_code"]) == ("preempted", 75)
    assert (tmp_path / "run" / "plots" / "loss.png").exists()


def test_ctrl_c_before_the_first_step_preempts(config_file: Path, tmp_path: Path, start: Any) -> None:
    process = start("train", str(config_file))
    deadline = time.monotonic() + 60
    while len(ranks_of(process)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    while not (tmp_path / "run" / "log.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # rank 0 has its handlers from here on; both are still joining or building
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode in (75, 3), errors
    assert status(tmp_path / "run")["exit_code"] == process.returncode
    assert errors.strip().splitlines()[-1].startswith("error: ")


def test_a_failed_start_replaces_an_old_status(config_file: Path, tmp_path: Path) -> None:
    assert boost("train", str(config_file), "train.steps=1").returncode == 0
    assert status(tmp_path / "run")["status"] == "done"
    result = boost("train", str(config_file), "data.path=/nowhere")
    assert result.returncode == 2
    assert (status(tmp_path / "run")["status"], status(tmp_path / "run")["exit_code"]) == ("failed", 2)
    assert "UserError" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["train", "{config}", "optimizer.lrr=1"], ["command line", "optimizer.lrr", "optimizer.lr"]),
        (["train", "{config}", "data.path=/nowhere"], ["data.path: no such dataset: /nowhere; make it"]),
        (["train", "{config}", "data.path=nowhere"], ["data.path: no such dataset: nowhere in {folder}; make it"]),
        (["train", "{config}", "model.heads=6", "model.head_size=8", "parallel.tp=4"], ["parallel.tp", "model.heads"]),
        (["train", "no-such-file.yaml"], ["no-such-file.yaml"]),
        (["train", "quickstrt"], ["quickstrt", "quickstart"]),
        (["train", "{config}", "parallel.pp=8", "parallel.pipeline_schedule=gpipe"], ["parallel.pp", "model.layers"]),
        (["train"], ["command line", "'config'; see `", "boost train --help`"]),
        (["train", "{config}", "--train.steps=3"], ["--train.steps; ", "such as train.steps=10, without dashes"]),
        (["generate", "nowhere", "--prompt", "x"], ["nowhere"]),
        (["data", "prepare", "missing.txt", "--out", "out", "--tokenizer", "bpe4096"], ["missing.txt"]),
    ],
    ids=str,
)
def test_mistakes_are_one_line(config_file: Path, tmp_path: Path, arguments: list[str], names: list[str]) -> None:
    """Exit code 2 within 10 seconds, nothing on standard error but lines that name the mistake."""
    began = time.monotonic()
    result = boost(*(argument.format(config=config_file) for argument in arguments), cwd=tmp_path)
    assert time.monotonic() - began < 10
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    for name in names:
        assert name.format(folder=tmp_path) in line


def test_all_mistakes_are_reported_at_once(config_file: Path) -> None:
    result = boost("train", str(config_file), "optimizer.lr=-1", "model.layers=x", "train.step=3")
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 3


def test_numerics_end_with_4(config_file: Path, tmp_path: Path) -> None:
    result = boost("train", str(config_file), "optimizer.lr=1e30", "schedule.warmup_steps=0")
    assert result.returncode == 4, result.stderr
    assert "is nan" in result.stderr or "is inf" in result.stderr
    found = status(tmp_path / "run")
    assert (found["status"], found["exit_code"]) == ("failed", 4)
    assert "NumericsError" in (tmp_path / "run" / "log.txt").read_text()


def test_one_run_at_a_time(config_file: Path, tmp_path: Path, start: Any) -> None:
    first = start("train", str(config_file), "train.steps=5000")
    wait_for_step(tmp_path / "run", 1, first)
    for tp in (1, 2):
        second = boost("train", str(config_file), f"parallel.tp={tp}")
        assert second.returncode == 2
        assert "is in use by another run" in second.stderr
        assert first.poll() is None, "the first run goes on"
        assert not (tmp_path / "run" / "status.json").exists()


def test_torchrun_starts_the_same_run(config_file: Path, tmp_path: Path) -> None:
    """Under torchrun the command uses the ranks it finds; a wrong number of them is a mistake of the user."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = ["-m", "boost", "train", str(config_file), "train.steps=3"]
    result = subprocess.run([*launcher, "2", *command], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    plain = boost("train", str(config_file), "train.steps=3", f"run.dir={tmp_path / 'plain'}")
    assert plain.returncode == 0
    assert [r["loss"] for r in records(tmp_path / "run")] == [r["loss"] for r in records(tmp_path / "plain")]
    wrong = subprocess.run(
        [*launcher, "1", *command, f"run.dir={tmp_path / 'wrong'}"], capture_output=True, text=True, timeout=120
    )
    assert wrong.returncode == 1
    assert "pp*dp*tp = 1*1*2 = 2, got WORLD_SIZE = 1" in wrong.stderr
    assert status(tmp_path / "wrong")["exit_code"] == 2


def test_print_config_can_be_trained(config_file: Path, tmp_path: Path) -> None:
    result = boost("train", str(config_file), "train.steps=2", "--print-config")
    assert result.returncode == 0
    (tmp_path / "resolved.yaml").write_text(result.stdout)
    assert yaml.safe_load(result.stdout)["train"]["steps"] == 2
    assert re.fullmatch(r"memory: about \d+ MiB per rank .*", result.stderr.splitlines()[-1])
    again = boost("train", str(tmp_path / "resolved.yaml"), "--print-config")
    assert again.stdout == result.stdout


def test_evaluate_and_generate(config_file: Path, tmp_path: Path) -> None:
    """`boost eval` gives the validation loss of the run; `boost generate` gives the same text for the same seed."""
    run = tmp_path / "run"
    trained = boost("train", str(config_file), "train.steps=3", "train.validate_every=3")
    assert trained.returncode == 0, trained.stderr
    data = yaml.safe_load(config_file.read_text())["data"]["path"]
    result = boost("eval", str(run), "--data", data)
    assert result.returncode == 0, result.stderr
    assert f"loss {records(run)[-1]['val_loss']:.4f}" in result.stdout
    texts = {boost("generate", str(run), "--prompt", "the of", "--max-tokens", "8").stdout for _ in range(2)}
    assert len(texts) == 1
    assert texts.pop().startswith("the of")
    assert boost("generate", str(run), "--prompt", "").returncode == 2


def test_a_pipeline_on_local_processes(config_file: Path, tmp_path: Path) -> None:
    """`boost train` starts its ranks and says how it is cut; `boost eval`, one process, agrees with its validation."""
    pipeline = ["parallel.tp=1", "parallel.pp=2", "train.micro_batch_size=1"]
    result = boost("train", str(config_file), *pipeline, "model.layers=3", "train.steps=3", "train.validate_every=3")
    assert result.returncode == 0, result.stderr
    assert "pipeline: 1f1b, stages of 2, 1 layers, 4 micro-batches" in result.stdout
    data = yaml.safe_load(config_file.read_text())["data"]["path"]
    evaluated = boost("eval", str(tmp_path / "run"), "--data", data)
    assert f"loss {records(tmp_path / 'run')[-1]['val_loss']:.4f}" in evaluated.stdout, evaluated.stderr


def test_help_documents_every_command() -> None:
    listing = boost("--help").stdout
    for command in ("train", "data", "generate", "eval"):
        assert command in listing
        assert boost(command, "--help").returncode == 0
