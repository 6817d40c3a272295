"""The Slurm script: what it asks for, how it quotes, and that it trains where `srun` starts its tasks."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from boost.config import TrainConfig
from boost.errors import UserError
from boost.slurm import batch_script, crosses_machines
from tests.processes import boost, records, status


def script(*overrides: str, nodes: int = 1, **options: str) -> str:
    return batch_script(TrainConfig.load("cola-1b", overrides), ["cola-1b", *overrides], nodes, **options)


def test_what_it_asks_for() -> None:
    text = script("parallel.tp=4", "parallel.dp=4", nodes=2, time="1-12:00:00", partition="gpu", account="me")
    for line in ("nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "time=1-12:00:00", "partition=gpu", "account=me"):
        assert f"\n#SBATCH --{line}\n" in text
    assert "gpus" not in script("train.device=cpu")
    directives = re.findall("^#SBATCH.*$", text, re.MULTILINE)
    assert text.startswith("#!/bin/bash\n" + "\n".join(directives)), "sbatch stops looking at the first command"


def test_ranks_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(UserError, match=r"--nodes: .* \(expected a divisor of tp\*pp\*dp = 4\*1\*1 = 4, got 3\)"):
        script("parallel.tp=4", nodes=3)


@pytest.mark.parametrize(
    ("tp", "dp", "nodes", "crosses"),
    [(4, 2, 2, False), (4, 2, 4, True), (2, 4, 4, False), (2, 3, 2, True), (1, 4, 4, False)],
)
def test_tensor_parallelism_between_machines_is_noticed(tp: int, dp: int, nodes: int, crosses: bool) -> None:
    config = TrainConfig.load("quickstart", [f"parallel.tp={tp}", f"parallel.dp={dp}", f"train.global_batch_size={dp}"])
    assert crosses_machines(config, nodes) == crosses


@pytest.mark.slow
def test_a_script_is_not_overwritten_by_another(tmp_path: Path) -> None:
    file = tmp_path / "run.sbatch"
    command = ("slurm", "quickstart", "--nodes", "2", "--output", str(file))
    first = boost(*command)
    assert (
        first.returncode == 0 and "memory: about" in first.stderr and "warning: parallel.tp: its ranks" in first.stderr
    )
    text = file.read_text()
    assert boost(*command).returncode == 0, "the same content is no loss"
    other = boost(*command, "parallel.dp=2")
    assert other.returncode == 2 and "exists already, with other content" in other.stderr
    assert file.read_text() == text


@pytest.mark.parametrize("option", ["time", "partition", "account"])
@pytest.mark.parametrize("value", ["", "a b", "x\n#SBATCH --mail-user=me", "$(touch here)", "1;2"])
def test_what_slurm_does_not_take_is_refused(option: str, value: str) -> None:
    with pytest.raises(UserError, match=f"--{option}: is not one that Slurm takes"):
        script(**{option: value})


AWKWARD = 'runs/it\'s $(touch here) `x` "q" \\ *;&ü'


@pytest.mark.parametrize("directory", ["plain", "with space", "it's $HOME"])
def test_user_text_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str) -> None:
    """Run with an `srun` that shows its arguments, it starts the very command, where it was written."""
    place = tmp_path / directory
    place.mkdir()
    monkeypatch.chdir(place)
    overrides = [f"run.dir={AWKWARD}", "optimizer.lr=1e-3"]
    text = script(*overrides)
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    done = run_script(text, tmp_path, 'printf "%s\\0" "$PWD" "$MASTER_ADDR" "$MASTER_PORT" "$@"')
    seen = done.stdout.split("\0")[:-1]
    assert done.returncode == 0 and done.stderr == ""
    assert seen[:3] == [str(place), "node0", "20042"]
    assert seen[-5:] == ["boost", "train", "cola-1b", *overrides]
    assert list(place.iterdir()) == []


def run_script(text: str, directory: Path, srun: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with `srun` and `scontrol` of our own, the latter noting requeues in a file."""
    tools = directory / "tools"
    tools.mkdir(exist_ok=True)
    calls = shlex.quote(str(tools / "calls"))
    scontrol = f'if [ "$1" = show ]; then printf "node0\\nnode1\\n"; else echo "$@" >> {calls}; fi'
    for name, body in (("srun", srun), ("scontrol", scontrol)):
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", **variables}
    environment["SLURM_JOB_NODELIST"] = "node[0-1]"
    return subprocess.run(["bash"], input=text, text=True, capture_output=True, env=environment, timeout=120)


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (3, False), (75, True)])
def test_a_run_that_was_stopped_is_queued_again(tmp_path: Path, code: int, requeued: bool) -> None:
    assert run_script(script(), tmp_path, f"exit {code}").returncode == code
    calls = tmp_path / "tools" / "calls"
    assert (calls.read_text() if calls.exists() else "") == ("requeue 42\n" if requeued else "")


# As the real one: every task has its number, and the tasks' highest exit code is returned.
SRUN = """
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=2 MASTER_ADDR=localhost
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & pids+=($!); done
worst=0
for pid in "${pids[@]}"; do wait "$pid"; code=$?; if [ $code -gt $worst ]; then worst=$code; fi; done
exit $worst
"""


@pytest.mark.slow
def test_it_trains(config_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.sbatch"
    written = boost("slurm", str(config_file), "train.steps=3", "--nodes", "2", "--output", str(file))
    assert written.returncode == 0, written.stderr
    assert "--ntasks-per-node=1\n" in file.read_text()
    done = run_script(file.read_text(), tmp_path, SRUN)
    assert done.returncode == 0, done.stderr
    assert len(records(tmp_path / "run")) == 3
    assert status(tmp_path / "run")["status"] == "done"
