"""One rank of `boost bench layouts`: `python -m boost.bench.worker JOB.json`, with the ranks in the environment."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from boost.bench.intercept import intercepted
from boost.bench.serial_link import Link, TokenBucket
from boost.bench.step import Step, per_block
from boost.bench.variants import Variant
from boost.config import TrainConfig
from boost.parallel import mesh as meshes
from boost.parallel.collectives import all_reduce
from boost.parallel.mesh import Mesh


def main() -> None:
    """Measures every variant of the job, in turns, and writes what rank 0 saw."""
    job = json.loads(Path(sys.argv[1]).read_text())
    base = TrainConfig.from_dict(job["config"])
    variants = [Variant(**variant) for variant in job["variants"]]
    device = meshes.choose_device(base.train.device)
    parallel = base.parallel
    mesh = meshes.start(1, 1, parallel.tp, device, parallel.timeout_seconds)
    rate = job.get("bucket_bytes_per_second")
    timed = Step.timed if rate is None else partial(_slowed, TokenBucket(Link(rate)))
    rows = measure(base, variants, mesh, job["rounds"], timed)
    if mesh.world.rank == 0:
        Path(job["out"]).write_text(json.dumps(rows))
    meshes.stop()


def _slowed(bucket: TokenBucket, step: Step) -> tuple[float, float]:
    with intercepted(bucket.begin):
        return step.timed()


def measure(
    base: TrainConfig,
    variants: list[Variant],
    mesh: Mesh,
    rounds: int,
    timed: Callable[[Step], tuple[float, float]] = Step.timed,
) -> list[dict[str, Any]]:
    """One row per variant: counts first, then `rounds` timed steps of each in turns (A B C A B C ...).

    Args:
        timed: takes a step and returns its seconds and those of them spent waiting.
    """
    known: dict[str, dict[str, float]] = {}

    def costs(layout: str, options: dict[str, Any]) -> dict[str, float]:
        key = json.dumps([layout, options], sort_keys=True)
        if key not in known:
            # Kept bytes are counted after garbage collections, which then leave out all that was imported.
            gc.collect()
            gc.freeze()
            known[key] = per_block(Variant("", layout, options).config(base), mesh)
        return known[key]

    rows = [_counted(variant, costs) for variant in variants]
    steps = [Step(variant.config(base), mesh) for variant in variants]
    for row, step in zip(rows, steps, strict=True):
        row["peak_memory_bytes"] = step.peak_bytes()
        row["tokens"] = step.tokens
        step.run()
    times: list[list[tuple[float, float]]] = [[] for _ in variants]
    for _ in range(rounds):
        for number, step in enumerate(steps):
            times[number].append(timed(step))
    for row, seen in zip(rows, times, strict=True):
        row["seconds"] = [seconds for seconds, _ in seen]
        row["waits"] = [wait for _, wait in seen]
    return rows


def _counted(variant: Variant, costs: Callable[[str, dict[str, Any]], dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": variant.name, "layout": variant.layout, "options": variant.options}
    row |= costs(variant.layout, variant.options)
    row["recompute_collectives"] = 0
    if "train.recompute" in variant.options:
        kept = {name: value for name, value in variant.options.items() if name != "train.recompute"}
        plain = costs(variant.layout, kept)
        row["recompute_collectives"] = row["backward_collectives"] - plain["backward_collectives"]
        row |= {name: value for name, value in plain.items() if name.startswith("backward_")}
    return row


def gemm_rate(dtype: torch.dtype, device: torch.device, seconds: float = 1.0) -> float:
    """FLOP/s of this process's best GEMM at the bench's sizes."""
    a, b = torch.randn(1024, 1024, device=device).to(dtype), torch.randn(1024, 1024, device=device).to(dtype)
    best, stop = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < stop:
        began = time.perf_counter()
        for _ in range(4):
            a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 4 * 2 * 1024**3 / (time.perf_counter() - began))
    return best


def slowest(value: float, mesh: Mesh) -> float:
    """The mean of a number over all ranks."""
    return all_reduce(torch.tensor(value), mesh.world).item() / mesh.world.size


if __name__ == "__main__":
    main()
