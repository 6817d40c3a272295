"""Every method at the quickstart's size on the shipped text: bits per byte, parameters and time, over three seeds.

All methods train on the same tokens in the same order (of the seed; ReLoRA's second part in another one), in batches of
two sequences, with the quickstart's settings in all that is not the method's own; `METHODS` has what is. Each method
gets the same small sweep: three learning rates, a factor of two apart, on the first seed at full length. The best of
them then trains with the other seeds. Every run is a process of one thread, and two run at any time, so that their
times compare. Stopped, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from boost.config import TrainConfig
from boost.model import costs
from boost.model.decoder import outline

STEPS, BATCH, SEEDS, SPREAD = 320, 2, (0, 1, 2), (0.5, 1.0, 2.0)
NUMERICS = 4  # boost's exit code where a number is not finite
Settings = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """What a run has other than the quickstart.

    Attributes:
        lr: the middle of the sweep.
        settings: configuration fields, given the number of steps.
        warm_start: settings of a run that comes first, for the first quarter of the steps, at half the learning rate.
    """

    lr: float
    settings: Callable[[int], Settings]
    warm_start: Settings | None = None


DENSE: Settings = {"model.linear": "dense", "model.rank": None}
SVD: Settings = {"model.bottleneck_activation": "none"}


def loro(steps: int) -> Settings:
    """As published, but for what scales with the length: there a tenth of the run is warm-up, a twentieth a period."""
    return {
        **SVD,
        "model.factor_init": "xavier",
        "optimizer.name": "loro",
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-6,
        "optimizer.weight_decay": 0.0,
        "optimizer.clip": None,
        "optimizer.exact_every": steps // 10,
        "schedule.name": "jagged_cosine",
        "schedule.warmup_steps": steps // 10,
    }


def relora(steps: int) -> Settings:
    """Three cycles, each as long as the warm start. Published: 5,000 of 20,000 steps."""
    return {
        "model.linear": "relora",
        "model.lora_alpha": 16.0,  # as published, a quarter of the rank
        "optimizer.restart_every": steps // 4,
        "schedule.name": "jagged_cosine",
        "schedule.warmup_steps": steps // 40,
        "schedule.restart_warmup_steps": steps // 40,
        "train.steps": 3 * (steps // 4),
    }


METHODS = {
    "dense": Method(2e-3, lambda steps: DENSE),
    "svd": Method(2e-3, lambda steps: SVD),
    "cola": Method(2e-3, lambda steps: {}),
    "lax": Method(2e-3, lambda steps: {"model.crossing": "tensor"}),
    "loro": Method(5e-3, loro),
    "sltrain": Method(3e-3, lambda steps: {"model.linear": "sltrain", "model.lora_alpha": 16.0}),
    "relora": Method(2e-3, relora, warm_start={**DENSE, "schedule.name": "constant"}),
}


@dataclass(frozen=True)
class Run:
    """One training run, or two where there is a warm start, and the folder for it."""

    method: str
    lr: float
    seed: int
    folder: Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="for every run")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run (default {STEPS})")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help=f"seeds from 0 on (default {len(SEEDS)})")
    parser.add_argument("--rates", type=int, choices=(1, 3), default=3, help="learning rates in a sweep (default 3)")
    parser.add_argument("--work", type=Path, default=Path("runs/methods"), help="folder of data and runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table here; it is printed as well")
    arguments = parser.parse_args()
    if arguments.steps < 40:
        parser.error("--steps: at least 40, of which LORO's and ReLoRA's periods are parts")
    began = time.monotonic()
    base = [f"data.path={prepared(arguments.work)}", *arguments.overrides]
    methods: list[str] = arguments.methods
    # Runs under other overrides are other runs.
    folder = arguments.work / "-".join([f"{arguments.steps}-steps", *sorted(arguments.overrides)]).replace("/", "_")

    def run(name: str, lr: float, seed: int) -> Run:
        return Run(name, lr, seed, folder / f"{name}-lr{lr:g}-seed{seed}")

    def results(runs: Sequence[Run]) -> list[dict[str, Any]]:
        return two_at_a_time(runs, lambda each: result(each, arguments.steps, base), folder / "beside")

    factors = (1.0,) if arguments.rates == 1 else SPREAD
    sweep = results([run(name, METHODS[name].lr * factor, 0) for factor in factors for name in methods])
    best = {name: min((row for row in sweep if row["method"] == name), key=bits_per_byte) for name in methods}
    others = [run(name, best[name]["lr"], seed) for seed in range(1, arguments.seeds) for name in methods]
    rows = [*best.values(), *results(others)]
    summary = {
        "date": date.today().isoformat(),
        "machine": f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "command": " ".join(["benchmarks/compare_methods.py", *sys.argv[1:]]),
        "seconds": time.monotonic() - began,
        "steps": arguments.steps,
        "tokens": arguments.steps * next(row["tokens_per_step"] for row in rows if "tokens_per_step" in row),
        "methods": [summarised(name, [row for row in rows if row["method"] == name], sweep, base) for name in methods],
        "runs": [*sweep, *rows[len(methods) :]],
    }
    text = table(summary)
    print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    if arguments.table:
        arguments.table.write_text(text + "\n")


def prepared(work: Path) -> Path:
    """The shipped text, its last two documents held out: enough to measure, little enough to read twice in each run."""
    out = work / "data"
    command = [
        "data",
        "prepare",
        "sotu_1790_1899",
        "--tokenizer",
        "bpe4096",
        "--validation-last",
        "2",
        "--out",
        str(out),
    ]
    boost(command)
    return out


def configuration(name: str, settings: Settings, base: Sequence[str]) -> TrainConfig:
    return TrainConfig.load("quickstart", [*overrides(settings), *base])


def overrides(settings: Settings) -> list[str]:
    return [f"{field}={json.dumps(value)}" for field, value in settings.items()]


def result(run: Run, steps: int, base: Sequence[str]) -> dict[str, Any]:
    """Trains, unless that is done already, and reads what came of it."""
    method = METHODS[run.method]
    common: Settings = {
        "train.steps": steps,
        "train.global_batch_size": BATCH,
        "train.seed": run.seed,
        "data.seed": run.seed,
        "optimizer.lr": run.lr,
        "schedule.warmup_steps": steps // 10,
        "train.validate_every": steps,
        "parallel.tp": 1,
        "checkpoint.every": 0,
        "logging.tensorboard": False,
        "logging.plots": False,
    }
    outcome = {"method": run.method, "lr": run.lr, "seed": run.seed}
    first: list[dict[str, Any]] = []
    more: Settings = {}
    try:
        if method.warm_start is not None:
            warm = run.folder.with_name(run.folder.name + "-warm")
            quarter = {"train.steps": steps // 4, "train.validate_every": 0, "optimizer.lr": run.lr / 2}
            first = trained({**common, **method.warm_start, **quarter}, warm, base)
            # The order of the data would start again; with another seed it is another one.
            more = {"run.init_from": str(warm), "data.seed": run.seed + 1000}
        records = trained({**common, **method.settings(steps), **more}, run.folder, base)
    except Diverged:
        return {**outcome, "bits_per_byte": math.inf, "loss": math.inf, "seconds": math.nan}
    every = first + records
    return {
        **outcome,
        "bits_per_byte": records[-1]["val_bits_per_byte"],
        "loss": records[-1]["val_loss"],
        "seconds": sum(record["step_seconds"] for record in every),
        "steps": len(every),
        "tokens_per_step": records[0]["tokens"],
    }


class Diverged(Exception):
    """A run ended with a loss or gradient that is not finite."""


def trained(settings: Settings, folder: Path, base: Sequence[str]) -> list[dict[str, Any]]:
    """One run of the quickstart with these settings, and its metrics."""
    status = folder / "status.json"
    if not status.exists() or json.loads(status.read_text())["exit_code"] != 0:
        boost(["train", "quickstart", *overrides(settings), *base, f"run.dir={folder}"])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def boost(arguments: Sequence[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "boost", *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode == NUMERICS:
        raise Diverged
    if done.returncode:
        raise SystemExit(f"error: boost {' '.join(arguments)}\n{done.stderr}")


def two_at_a_time(runs: Sequence[Run], work: Callable[[Run], dict[str, Any]], spare: Path) -> list[dict[str, Any]]:
    """The results in order. Beside the last of an odd number runs a copy of the first, which does not count."""
    paired = list(runs)
    if len(runs) % 2:
        paired.append(Run(runs[0].method, runs[0].lr, runs[0].seed, spare / runs[0].folder.name))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, paired))[: len(runs)]


def bits_per_byte(row: dict[str, Any]) -> float:
    return float(row["bits_per_byte"])


def summarised(
    name: str, rows: Sequence[dict[str, Any]], sweep: Sequence[dict[str, Any]], base: Sequence[str]
) -> dict[str, Any]:
    """One line of the table."""
    model = configuration(name, METHODS[name].settings(STEPS), base).model
    trainable = sum(parameter.numel() for parameter in outline(model).parameters() if parameter.requires_grad)
    values = [bits_per_byte(row) for row in rows]
    return {
        "method": name,
        "parameters": costs.parameters(model),
        "trainable": trainable,
        "lr": rows[0]["lr"],
        "bits_per_byte": statistics.mean(values),
        "bits_per_byte_of_each_seed": values,
        "seconds": statistics.median(
            row["seconds"] for row in [*sweep, *rows[1:]] if row["method"] == name and "steps" in row
        ),
        "sweep": {f"{row['lr']:g}": bits_per_byte(row) for row in sweep if row["method"] == name},
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def table(summary: dict[str, Any]) -> str:
    """The summary as Markdown."""
    dense = next((row for row in summary["methods"] if row["method"] == "dense"), summary["methods"][0])
    lines = [
        "# Methods on real text, briefly",
        "",
        f"`{summary['command']}`, {summary['date']}, on {summary['machine']}; {summary['seconds'] / 60:.0f} minutes. "
        f"Every run sees {summary['tokens']:,} tokens of the shipped text at the quickstart's size. **Runs so short "
        "say how methods start, not where they end.** [README.md](README.md#compare_methodspy) says what is equal and "
        "what is not.",
        "",
        "| method | parameters | trained | learning rate | bits per byte, mean | lowest to highest "
        f"| time / {dense['method']}, median |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in summary["methods"]:
        values = row["bits_per_byte_of_each_seed"]
        lines.append(
            f"| {row['method']} | {row['parameters'] / 1e6:.2f} M | {row['trainable'] / 1e6:.2f} M | {row['lr']:g} "
            f"| {row['bits_per_byte']:.4f} | {min(values):.4f} to {max(values):.4f} "
            f"| {row['seconds'] / dense['seconds']:.2f} |"
        )
    lines += ["", "The sweeps, bits per byte of seed 0 at each learning rate:", "", "| method | sweep |", "|---|---|"]
    for row in summary["methods"]:
        swept = ", ".join(f"{lr}: {value:.4f}" for lr, value in row["sweep"].items())
        lines.append(f"| {row['method']} | {swept} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
