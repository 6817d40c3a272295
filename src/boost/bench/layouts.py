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
from boost.parallel.mesh import choose_device


def bench_layouts(
    config: TrainConfig, *, link: str = "auto", rounds: int = 7, variants: Sequence[Variant] | None = None
) -> dict[str, Any]:
    """Measures the variants on `parallel.tp` local processes and returns the contract's JSON object.

    Args:
        link: `none` (loopback), `auto` (namespaces joined by links whose rate gives this machine's compute the balance
            of A100s over NVLink; GPUs have links of their own), a rate in bytes per second, or `replay` (one rank
            alone, its collectives on a modelled link of the rate of `auto`, for more ranks than cores). Where
            namespaces are not possible a token bucket slows the collectives down to the rate, and the result's `link`
            says so.
        rounds: timed steps of each variant, in turns.

    Raises:
        UserError: an unknown link, or a model that is not low-rank.
        EnvironmentFailure: a rank failed.
    """
    if config.model.linear != "low_rank":
        raise UserError("model.linear", "has no layouts to compare", expected="low_rank", got=config.model.linear)
    rate = _rate(config, link)
    variants = list(variants if variants is not None else layout_variants())
    described = [{"name": v.name, "layout": v.layout, "options": v.options} for v in variants]
    job = {"config": config.model_dump(mode="json"), "variants": described, "rounds": rounds}
    if link == "replay":
        rows = _run_job("boost.bench.replay", job | {"bytes_per_second": rate}, [{}], None)
        kind = "replay"
    elif rate is None:
        rows, kind = _run_ranks(config, job, None), "none"
    else:
        rows, kind = _run_limited(config, job, rate)
    return {
        "machine": _machine(),
        "config": config.model_dump(mode="json"),
        "link": kind,
        "link_bytes_per_second": rate,
        "rows": [_summary(row) for row in rows],
    }


def _rate(config: TrainConfig, link: str) -> float | None:
    on_gpus = link != "replay" and choose_device(config.train.device).type == "cuda"
    if link == "none" or (link == "auto" and on_gpus):
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
    if on_gpus:
        raise UserError("--link", "cannot slow the links of GPUs", expected="auto, none or replay", got=link)
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


def _run_limited(config: TrainConfig, job: dict[str, Any], rate: float) -> tuple[list[dict[str, Any]], str]:
    """Over rate-limited links, or where they cannot be made over loopback with a token bucket; and which it was."""
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(limited_links(config.parallel.tp, rate))
        except LinkError as error:
            kind = f"token bucket, because {error}"
            print(f"warning: --link: no network namespaces, the link is a {kind}", file=sys.stderr)
            return _run_ranks(config, job | {"bucket_bytes_per_second": rate}, None), kind
        return _run_ranks(config, job, cluster), "limited"


def _run_ranks(config: TrainConfig, job: dict[str, Any], cluster: Cluster | None) -> list[dict[str, Any]]:
    world = config.parallel.tp
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": cluster.master if cluster else "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    if cluster:
        common["GLOO_SOCKET_IFNAME"] = cluster.interface
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return _run_job("boost.bench.worker", job, ranks, cluster)


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
