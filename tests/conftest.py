"""Fixtures for tests that run the command as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import children, write_config
from tests.training.conftest import dataset, settings

__all__ = ["dataset", "settings"]


@pytest.fixture
def config_file(settings: dict[str, Any], tmp_path: Path) -> Path:
    """A run over two processes, long enough to be interrupted; a checkpoint every 20 steps."""
    return write_config(settings, tmp_path)


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts a command in the background and makes sure that nothing of it is left."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [sys.executable, *launcher, "-m", "boost", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        for pid in [process.pid, *children(process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.communicate()
