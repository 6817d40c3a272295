"""`benchmarks/`: the scripts run; what they measure is for a quiet machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def gpu(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **environment}
    command = [str(ROOT / "benchmarks" / "gpu.sh"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=full)


@pytest.mark.slow
def test_gpu_script_on_the_cpu(tmp_path: Path) -> None:
    """Every layout is checked and timed; what a CPU cannot do has its reason in the table."""
    file = tmp_path / "gpu.json"
    done = gpu("--device", "cpu", "--tiny", "--repeats", "1", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert len(result["numerics"]) == 8
    assert all(check["passed"] for check in result["numerics"])
    assert {row["layout"] for row in result["rows"]} == {"dense", "vanilla", "vanilla_sharded_heads", "btp"}
    for row in result["rows"]:
        assert row["step_seconds"]["eager"] > 0
        assert row["communication_seconds"] > 0
        assert row["step_seconds"].keys() | row["not_measured"].keys() == {
            "eager",
            "graph",
            "compiled",
            "compiled, graph",
        }
        assert row["not_measured"]["graph"] == "needs CUDA"
        if row["options"].get("parallel.overlap") != "split_batch":
            assert row["step_seconds"]["compiled"] > 0
    assert "REPLACED" in done.stdout
    assert "needs CUDA" in done.stdout


def test_gpu_script_skips_what_it_has_no_time_for() -> None:
    done = gpu("--device", "cpu", "--tiny", "--budget", "0")
    assert done.returncode == 0, done.stderr
    assert "out of time" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_script_without_a_gpu() -> None:
    done = gpu()
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "no CUDA device" in done.stderr
