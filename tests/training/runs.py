"""Runs of the training loop inside this process or on local ranks, and what they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from boost.checkpoint.store import open_checkpoint
from boost.config import TrainConfig
from boost.parallel.mesh import Mesh
from boost.training.loop import train
from boost.training.run_directory import RunDirectory
from tests.distributed.harness import run_ranks


def _train(mesh: Mesh, config: TrainConfig) -> None:
    train(config, mesh, RunDirectory(config.run.dir))


def run(config: TrainConfig) -> list[dict[str, Any]]:
    """Trains on as many ranks as the configuration asks for; returns the metrics."""
    parallel = config.parallel
    world = parallel.tp * parallel.pp * parallel.dp
    if world == 1:
        _train(Mesh(), config)
    else:
        layout = (parallel.pp, parallel.dp, parallel.tp)
        run_ranks(world, _train, config, layout=layout, shards=parallel.shards)
    return metrics(config)


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return RunDirectory(config.run.dir).read_metrics()


def losses(config: TrainConfig) -> list[float]:
    """The loss of every step."""
    return [record["loss"] for record in metrics(config)]


def state_hash(config: TrainConfig, step: int | None = None) -> str:
    """The hash of the newest checkpoint, or of the one at a step."""
    path = Path(config.run.dir) / "checkpoints"
    return open_checkpoint(path if step is None else path / f"step-{step}").state_hash
