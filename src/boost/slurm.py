"""A Slurm batch script for a run: one task per rank, started by `srun` as `boost.launch` expects it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from boost.config import TrainConfig
from boost.errors import UserError

# What Slurm takes for names and times; anything else could end the comment line that carries it.
_NAME = re.compile(r"[A-Za-z0-9_.,:@+-]+")
_TIME = re.compile(r"[0-9]+(-[0-9]+)?(:[0-9]+){0,2}")

_SCRIPT = """\
#!/bin/bash
{directives}

set -uo pipefail
cd {directory}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${{nodes%%$'\\n'*}}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}

# The rank that fails says why and leaves; the others get a minute to do the same.
srun --kill-on-bad-exit=0 --wait=60 {command}
code=$?

# 75: stopped by a signal, such as the one before the time limit, with the state saved. Queued again, it goes on.
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def batch_script(
    config: TrainConfig,
    arguments: Sequence[str],
    nodes: int,
    *,
    time: str | None = None,
    partition: str | None = None,
    account: str | None = None,
) -> str:
    """The script, for `sbatch`; it runs in the present directory, with this interpreter.

    Args:
        config: what `arguments` stand for.
        arguments: of `boost train`.
        nodes: machines that share the ranks evenly.

    Raises:
        UserError: the ranks cannot be shared evenly, or a name or time is none.
    """
    parallel = config.parallel
    world = parallel.tp * parallel.pp * parallel.dp
    if world % nodes:
        raise UserError(
            "--nodes",
            "the ranks cannot be shared evenly",
            expected=f"a divisor of tp*pp*dp = {parallel.tp}*{parallel.pp}*{parallel.dp} = {world}",
            got=nodes,
            hint="set parallel.dp",
        )
    options = {
        "job-name": "boost",
        "nodes": str(nodes),
        "ntasks-per-node": str(world // nodes),
        "gpus-per-node": None if config.train.device == "cpu" else str(world // nodes),
        "signal": "TERM@120",
        "open-mode": "append",
        "time": _checked("--time", time, _TIME, "such as 24:00:00"),
        "partition": _checked("--partition", partition, _NAME, "a name"),
        "account": _checked("--account", account, _NAME, "a name"),
    }
    directives = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    return _SCRIPT.format(
        directives="\n".join([*directives, "#SBATCH --requeue"]),
        directory=shlex.quote(str(Path.cwd())),
        command=shlex.join([sys.executable, "-m", "boost", "train", *arguments]),
    )


def crosses_machines(config: TrainConfig, nodes: int) -> bool:
    """Whether the tp ranks of a group, which are neighbours, lie on more than one of these machines."""
    parallel = config.parallel
    return parallel.tp * parallel.pp * parallel.dp // nodes % parallel.tp != 0


def _checked(option: str, value: str | None, pattern: re.Pattern[str], expected: str) -> str | None:
    if value is not None and not pattern.fullmatch(value):
        raise UserError(option, "is not one that Slurm takes", expected=expected, got=repr(value))
    return value
