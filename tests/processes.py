"""The `boost` command as processes: runs to interrupt, the ranks below a launcher, and what a run leaves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml


def boost(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "boost", *arguments], capture_output=True, text=True, timeout=240, **options
    )


def write_config(settings: dict[str, Any], directory: Path) -> Path:
    """Two processes, long enough to be interrupted; a checkpoint every 20 steps."""
    settings["train"] |= {"steps": 200, "precision": "fp32"}
    settings["checkpoint"] |= {"every": 20, "keep": 0}
    settings["parallel"] = {"tp": 2, "timeout_seconds": 60}
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def records(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def status(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "status.json").read_text())


def wait_for_step(directory: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = records(directory)
        if found and found[-1]["step"] >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("the run did not get there in time")


def children(pid: int) -> list[int]:
    """Process ids below `pid`, in no order."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    below, frontier = [], [pid]
    while frontier:
        frontier = [child for child, parent in found.items() if parent in frontier]
        below += frontier
    return below


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Rank to pid of the launcher's ranks."""
    ranks = {}
    for pid in children(process.pid):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks.update({int(item[5:]): pid for item in environment if item.startswith(b"RANK=")})
    return ranks
