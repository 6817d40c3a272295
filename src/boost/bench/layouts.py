"""`boost bench layouts`: the same model under every layout, alternated in one run of the same processes."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from boost.bench.link import FLOP_PER_BYTE, Cluster, LinkError, limited_links
from boost.bench.variants import Variant, layout_variants
from boost.config import TrainConfig
from boost.errors import EnvironmentFailure, UserError


def bench_layouts(
    config: TrainConfig, *, link: str = "auto", rounds: int = 7, variants: Sequence[Variant] | None = None
) -> dict[str, Any]:
    """Measures the variants on `parallel.tp` local processes and returns the contract's JSON object.

    Args:
        link: `none` (loopback), `auto` (namespaces joined by links whose rate gives this machine's compute the balance
            of A100s over NVLink), a rate in bytes per second, or `replay` (one rank alone, its collectives on a
            modelled link of the rate of `auto`, for more ranks than cores).
        rounds: timed steps of each variant, in turns.

    Raises:
        UserError: an unknown link.
        EnvironmentFailure: namespaces are not possible here, or a rank failed.
    """
    rate, replay = _rate(config, link), link == "replay"
    variants = list(variants if variants is not None else layout_variants())
    with ExitStack() as stack:
        cluster = None
        if rate is not None and not replay:
            try:
                cluster = stack.enter_context(limited_links(config.parallel.tp, rate))
            except LinkError as error:
                raise EnvironmentFailure("--link", f"no rate-limited link: {error}", hint="use --link none") from error
        rows = _replay(config, variants, rounds, rate) if replay else _run_ranks(config, variants, rounds, cluster)
    return {
        "machine": _machine(),
        "config": config.model_dump(mode="json"),
        "link": "replay" if replay else "none" if rate is None else "limited",
        "link_bytes_per_second": rate,
        "rows": [_summary(row) for row in rows],
    }


def _rate(config: TrainConfig, link: str) -> float | None:
    if link == "none":
        return None
    if link in ("auto", "replay"):
        return _gemm_rate(config) / FLOP_PER_BYTE
    try:
        rate = float(link)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        expected = "a rate in bytes per second, auto, none or replay"
        raise UserError("--link", "is not allowed", expected=expected, got=link)
    return rate


def _gemm_rate(config: TrainConfig) -> float:
    """The best GEMM rate of one rank while all ranks compute, FLOP/s."""
    code = (
        "import torch; from boost.bench.worker import gemm_rate; torch.set_num_threads(1);"
        f"print(gemm_rate(torch.{_dtype(config)}, torch.device('cpu'), 2.0))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=_environment())
        for _ in range(min(config.parallel.tp, os.cpu_count() or 1))
    ]
    return statistics.median(float(process.communicate()[0]) for process in processes)


def _dtype(config: TrainConfig) -> str:
    return {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}[config.train.precision]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _run_ranks(
    config: TrainConfig, variants: Sequence[Variant], rounds: int, cluster: Cluster | None
) -> list[dict[str, Any]]:
    world = config.parallel.tp
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": cluster.master if cluster else "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    if cluster:
        common["GLOO_SOCKET_IFNAME"] = cluster.interface
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return _run_job("boost.bench.worker", _job(config, variants, rounds), ranks, cluster)


def _replay(config: TrainConfig, variants: Sequence[Variant], rounds: int, rate: float | None) -> list[dict[str, Any]]:
    return _run_job("boost.bench.replay", _job(config, variants, rounds) | {"bytes_per_second": rate}, [{}], None)


def _job(config: TrainConfig, variants: Sequence[Variant], rounds: int) -> dict[str, Any]:
    described = [{"name": v.name, "layout": v.layout, "options": v.options} for v in variants]
    return {"config": config.model_dump(mode="json"), "variants": described, "rounds": rounds}


def _run_job(
    module: str, job: dict[str, Any], ranks: Sequence[dict[str, str]], cluster: Cluster | None
) -> list[dict[str, Any]]:
    """Runs a module once per rank, each with its environment, on a job that is a file; returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as directory:
        path, out = Path(directory) / "job.json", Path(directory) / "rows.json"
        path.write_text(json.dumps(job | {"out": str(out)}))
        command = [sys.executable, "-m", module, str(path)]
        processes = []
        for rank, environment in enumerate(ranks):
            full = cluster.command(rank, command) if cluster else command
            processes.append(
                subprocess.Popen(full, env=_environment() | environment, stderr=subprocess.PIPE, text=True)
            )
        try:
            errors = [process.communicate()[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, (process, error) in enumerate(zip(processes, errors, strict=True)):
            if process.returncode:
                last = (error.strip().splitlines() or ["no word"])[-1]
                raise EnvironmentFailure("bench", f"rank {rank} failed: {last}")
        rows: list[dict[str, Any]] = json.loads(out.read_text())
        return rows


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the contract: medians, and the spread as half the distance between the quartiles."""
    seconds, waits, tokens = row.pop("seconds"), row.pop("waits"), row.pop("tokens")
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median,) * 3
    return row | {
        "step_seconds": median,
        "step_seconds_spread": (high - low) / 2,
        "tokens_per_second": tokens / median,
        "comm_wait_seconds": statistics.median(waits),
    }


def _machine() -> dict[str, Any]:
    import torch

    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
