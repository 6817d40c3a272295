"""What a person sees of a run: a summary at the start, then a moving line on a terminal and plain lines in the log."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from boost.config import TrainConfig
from boost.data.dataset import Dataset
from boost.data.sampler import num_sequences
from boost.model import costs
from boost.parallel.mesh import Mesh

logger = logging.getLogger("boost")
console = Console(file=sys.stdout, soft_wrap=True)


def console_handler() -> logging.Handler:
    """Sends a log to standard output."""
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_level=False, markup=False, highlighter=None)
    else:
        handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler


class Progress:
    """A progress bar where standard output is a terminal; always one log line every `every` steps."""

    def __init__(self, steps: int, start: int, *, enabled: bool) -> None:
        self.steps = steps
        self._bar = None
        if enabled and console.is_terminal and steps > start:
            self._bar = RichProgress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=steps, completed=start, numbers="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, record: dict[str, Any], every: int) -> None:
        """Shows one step's record."""
        numbers = f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], numbers=numbers)
        if "pipeline_idle" in record:
            numbers += f"  ranks idle {record['pipeline_idle_seconds']:.3f} s, {record['pipeline_idle']:.1%}"
        if record["step"] % every == 0 or record["step"] in (1, self.steps):
            logger.info(
                "step %*d/%d  %s  grad norm %.3f  lr %.2e",
                len(str(self.steps)),
                record["step"],
                self.steps,
                numbers,
                record["grad_norm"],
                record["lr"],
            )


def state_bytes(config: TrainConfig) -> float:
    """About what a rank holds between two micro-batches: masters, moments, gradients, and weights that ZeRO gathered.

    The gradients and two moments of what is trained are as large as its masters.
    """
    parallel = config.parallel
    stage = parallel.zero if parallel.shards > 1 else 0
    count = costs.parameters(config.model)
    trained = count - config.model.layers * costs.block_frozen_parameters(config.model)
    master = 8 if config.train.precision == "fp64" else 4
    masters, moments, gradients = master * count, 2 * master * trained, master * trained
    gathered = (2 if config.train.precision == "bf16" else master) * count
    total = {
        0: masters + moments + gradients,
        1: gathered + gradients + (masters + moments) / parallel.shards,
        2: gathered + (masters + moments + gradients) / parallel.shards,
        3: (masters + moments + gradients) / parallel.shards,
    }[stage]
    return total / parallel.tp / parallel.pp


def memory_line(config: TrainConfig) -> str:
    return (
        f"memory: about {state_bytes(config) / 2**20:.0f} MiB per rank for weights, gradients and moments, "
        "activations not counted"
    )


def log_summary(config: TrainConfig, mesh: Mesh, dataset: Dataset, start: int) -> None:
    """What is about to be trained, on what, and for how long."""
    model, train, parallel = config.model, config.train, config.parallel
    count = costs.parameters(model)
    tokens = train.global_batch_size * train.sequence_length
    epochs = train.steps * train.global_batch_size / num_sequences(dataset.train, train.sequence_length)
    kind = model.linear if model.rank is None else f"{model.linear}, rank {model.rank}"
    accumulation = train.global_batch_size // (mesh.dp.size * train.micro_batch_size)
    logger.info("model: %s parameters, %d layers, hidden %d (%s)", f"{count:,}", model.layers, model.hidden_size, kind)
    logger.info(
        "layout: %s, tp %d x pp %d x dp %d on %s, %s",
        config.layout,
        parallel.tp,
        parallel.pp,
        parallel.dp,
        mesh.device.type,
        train.precision,
    )
    logger.info(
        "batch: %d sequences of %d = %s tokens per step, %d micro-batches of %d per data-parallel rank",
        train.global_batch_size,
        train.sequence_length,
        f"{tokens:,}",
        accumulation,
        train.micro_batch_size,
    )
    logger.info("%s", memory_line(config))
    logger.info(
        "data: %s, %s training tokens, %.2f epochs in %d steps",
        dataset.path,
        f"{len(dataset.train):,}",
        epochs,
        train.steps,
    )
    logger.info("run: %s, from step %d", config.run.dir, start)
    if train.validate_every and dataset.validation is None:
        logger.warning("train.validate_every has no effect: %s has no validation split", dataset.path)
    if parallel.zero and parallel.dp == 1:
        logger.warning("parallel.zero has no effect: parallel.dp is 1")
