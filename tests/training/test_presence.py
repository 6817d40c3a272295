"""Who is dead, who is silent, who has spoken."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from boost.training.presence import Presence

RANK = """
import sys, time
from boost.training.presence import Presence
presence = Presence(__import__("pathlib").Path(sys.argv[1]), int(sys.argv[2]), 4)
print("here", flush=True)
for line in sys.stdin:
    getattr(presence, line.strip())()
    print("done", flush=True)
"""


@pytest.fixture
def others(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks 1 to 3, each a process that does what it is told."""
    command = [sys.executable, "-c", RANK, str(tmp_path / "ranks")]
    processes = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in (1, 2, 3)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def test_the_dead_are_told_from_the_silent(tmp_path: Path, others: list[subprocess.Popen[str]]) -> None:
    mine = Presence(tmp_path / "ranks", 0, 4)
    assert mine.gone(patience=0) == []
    assert mine.silent(patience=0) == [1, 2, 3]
    others[0].send_signal(signal.SIGSTOP)
    others[1].kill()
    others[1].wait()
    assert mine.gone() == [2]
    tell(others[2], "report")
    assert mine.silent(patience=0) == [1, 2]
    others[2].kill()
    others[2].wait()
    assert mine.gone() == [2], "one that has spoken is not lost"
    again = Presence(tmp_path / "ranks", 3, 4)  # started again, it has not spoken
    assert mine.gone() == [2]
    assert mine.silent(patience=0) == [1, 2, 3]
    again.leave()
    assert mine.gone() == [2, 3], "one that leaves early is lost"


def test_a_failure_of_the_attempt_before_is_none_of_this_one(tmp_path: Path) -> None:
    before = [Presence(tmp_path / "ranks", rank, 3) for rank in range(3)]
    for presence in before:
        presence.report()
    for presence in before:
        assert presence.gone(patience=0) == []
        presence._file.close()  # as when its process ends
    time.sleep(0.05)  # more than file systems round times to
    mine, _other = (Presence(tmp_path / "ranks", rank, 3) for rank in (0, 1))
    assert mine.gone() == [2], "it has not started again"
    assert mine.silent(patience=0) == [1, 2]


def test_some_of_the_dead_are_seen_by_every_rank(tmp_path: Path) -> None:
    """Each rank looks at few: a dead one is seen by some, and when those leave, by all."""
    world = 11
    ranks = [Presence(tmp_path / "ranks", rank, world) for rank in range(world)]
    assert [presence.ended() for presence in ranks] == [[]] * world
    ranks[7]._file.close()  # as when its process ends
    left, rounds = {7}, 0
    while len(left) < world:
        seen = {rank for rank in range(world) if rank not in left and ranks[rank].ended()}
        for rank in seen:
            ranks[rank].report()
            ranks[rank]._file.close()
        left, rounds = left | seen, rounds + 1
        assert seen and rounds <= 4


def test_locks_that_do_not_show_say_nothing(tmp_path: Path) -> None:
    mine = Presence(tmp_path / "ranks", 0, 2)
    assert mine.ended() == mine.gone(patience=0) == [1]
    mine.locks_tell = False
    assert mine.ended() == mine.gone(patience=0) == []
    assert mine.silent(patience=0) == [1]


def test_it_waits_for_the_others_to_speak(tmp_path: Path, others: list[subprocess.Popen[str]]) -> None:
    mine = Presence(tmp_path / "ranks", 0, 4)
    began = time.monotonic()
    assert mine.silent(patience=0.3) == [1, 2, 3]
    assert time.monotonic() - began >= 0.3
    for process in others:
        tell(process, "report")
    began = time.monotonic()
    assert mine.silent(patience=30) == []
    assert mine.gone(patience=0) == []
    assert time.monotonic() - began < 5
