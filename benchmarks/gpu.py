"""One GPU as one rank of a tensor-parallel group: numerics on the device, then the time of its real shard per layout.

The other ranks do not exist. Each collective is replaced by its modelled cost, by default the all-reduce that the
BOOST paper measured among 4 A100s, t = 56 us + bytes / 141 GB/s: on a GPU a kernel that idles for that long on a
stream of its own, the link, so that asynchronous collectives overlap computation as they would; on a CPU the virtual
clock of `boost bench layouts --link replay`. Values are not those of a real group, work and shapes are.

A model of one and one of three blocks are timed; the difference is two blocks, from which a step of all layers is
scaled. Each variant runs as it is, with torch.compile per block, in a CUDA graph, and in both; where one of these does
not work, the table says why.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boost.bench.intercept import Work
from boost.bench.replay import VirtualClock, check_replayed, lonely_mesh, replayed
from boost.bench.serial_link import Link
from boost.bench.step import Step, per_block
from boost.bench.variants import Variant
from boost.config import TrainConfig
from boost.model.decoder import Decoder
from boost.parallel.collectives import count_collectives
from boost.parallel.mesh import Mesh
from boost.parallel.sharding import described

LAYOUTS = {
    "dense": ("dense", {}),
    "dense, overlap": ("dense", {"parallel.overlap": "weight_grads"}),
    "vanilla": ("vanilla", {}),
    "vanilla, sharded heads": ("vanilla_sharded_heads", {}),
    "BTP": ("btp", {}),
    "BTP, overlap weight gradients": ("btp", {"parallel.overlap": "weight_grads"}),
    "BTP, overlap split batch": ("btp", {"parallel.overlap": "split_batch"}),
}
VARIANTS = [Variant(name, layout, options) for name, (layout, options) in LAYOUTS.items()]
# In the order of their worth, should time run out.
MODES = ("eager", "graph", "compiled", "compiled, graph")
LAYERS = (1, 3)
# Of a gradient's norm, against fp64 on the CPU.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


class Unsupported(Exception):
    """A mode that does not work here; the message says why."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="a shape that a CPU runs in seconds: tries the script")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps, of which the median counts (default 10)")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which what is left is skipped")
    parser.add_argument("--latency-us", type=float, default=56.0, help="of a collective (default 56)")
    parser.add_argument("--all-reduce-gbs", type=float, default=141.0, help="bytes all-reduced per ns (default 141)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("error: gpu.py: no CUDA device is visible; --device cpu --tiny tries the script without", file=sys.stderr)
        sys.exit(2)
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu needs --tiny")
    device = torch.device(arguments.device)
    deadline = time.monotonic() + arguments.budget

    checks = numerics(device)
    print(numerics_table(checks))
    base = config(arguments.tiny)
    # In a ring each byte of the tensor passes 2 (T - 1) / T times.
    tp = base.parallel.tp
    link = Link(arguments.all_reduce_gbs * 1e9 * 2 * (tp - 1) / tp, arguments.latency_us * 1e-6)
    mesh = lonely_mesh(tp, device)
    rows = []
    for micro_batch in (2,) if arguments.tiny else (1, 4):
        for variant in VARIANTS:
            if variant.options.get("parallel.overlap") == "split_batch" and micro_batch == 1:
                continue  # nothing to split
            rows.append(Row(variant, base, micro_batch, mesh, link))
    backend = "aot_eager" if arguments.tiny else "inductor"
    for mode in MODES:
        for row in rows:
            row.measure(mode, arguments.repeats, deadline, backend)
    content = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "config": base.model_dump(mode="json"),
        "collectives": {
            "latency_seconds": link.latency,
            "all_reduced_bytes_per_second": arguments.all_reduce_gbs * 1e9,
        },
        "compiler": backend,
        "numerics": checks,
        "rows": [row.result() for row in rows],
    }
    print(table(content))
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    broken = [row for row in rows if row.reasons.get("eager", "out of time") != "out of time"]
    if broken:
        print(f"error: gpu.py: {broken[0].variant.name}: {broken[0].reasons['eager']}", file=sys.stderr)
        sys.exit(3)
    if not all(check["passed"] for check in checks):
        print("error: gpu.py: numerics on the device are off, see the first table", file=sys.stderr)
        sys.exit(4)


def config(tiny: bool) -> TrainConfig:
    """The shape of CoLA-7b on four ranks, or one that a CPU runs in seconds."""
    sizes = ["train.sequence_length=4096"]
    if tiny:
        sizes = ["model.hidden_size=64", "model.ffn_size=176", "model.layers=4", "model.heads=4", "model.rank=16"]
        sizes += ["model.vocab_size=256", "train.sequence_length=32"]
    return TrainConfig.load(
        "cola-7b", [*sizes, "parallel.tp=4", "train.global_batch_size=4", "train.micro_batch_size=1"]
    )


# --- Numerics ---


def numerics(device: torch.device) -> list[dict[str, Any]]:
    """Loss and gradients of one small block of every layout and precision, against fp64 on the CPU, one rank."""
    model = ["model.hidden_size=256", "model.ffn_size=688", "model.layers=1", "model.heads=4", "model.rank=64"]
    model += ["model.vocab_size=512", "train.sequence_length=64", "train.global_batch_size=2"]
    base = TrainConfig.load("cola-7b", [*model, "train.micro_batch_size=2"])
    checks = []
    for layout in ("dense", "vanilla", "vanilla_sharded_heads", "btp"):
        variant = Variant(layout, layout)
        exact = loss_and_gradients(variant.config(with_precision(base, "fp64")), torch.device("cpu"))
        for precision, tolerance in TOLERANCE.items():
            loss, gradients = loss_and_gradients(variant.config(with_precision(base, precision)), device)
            worst = max(distance(gradients[name], gradient) for name, gradient in exact[1].items())
            off = abs(loss / exact[0] - 1)
            checks.append(
                {
                    "layout": layout,
                    "precision": precision,
                    "loss_error": off,
                    "worst_gradient_error": worst,
                    "tolerance": tolerance,
                    "passed": off <= tolerance and worst <= tolerance,
                }
            )
    return checks


def with_precision(base: TrainConfig, precision: str) -> TrainConfig:
    return base.model_copy(update={"train": base.train.model_copy(update={"precision": precision})})


def loss_and_gradients(config: TrainConfig, device: torch.device) -> tuple[float, dict[str, Tensor]]:
    """Of one step of random tokens: the mean loss, and every canonical gradient in fp64."""
    step = Step(config, Mesh(device=device))
    loss = step.forward()
    loss.backward()
    gradients = {}
    for parameter, parts in described(step.model):
        assert parameter.grad is not None
        gradients |= {part.name: part.view(parameter.grad, step.mesh.tp).double().cpu() for part in parts}
    return loss.item(), gradients


def distance(value: Tensor, exact: Tensor) -> float:
    """In norm, relative; infinite where it is not a number, which `max` would pass by."""
    relative = float((value - exact).norm() / exact.norm())
    return math.inf if math.isnan(relative) else relative


# --- Time ---


class IdleLink:
    """The transport of a GPU: a stream on which each collective idles for its modelled time, one after another."""

    def __init__(self, link: Link) -> None:
        self.link, self.stream = link, torch.cuda.Stream()
        self.cycles_per_second = self._calibrate()

    def _calibrate(self) -> float:
        cycles, (began, ended) = 20_000_000, (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        began.record()
        torch.cuda._sleep(cycles)
        ended.record()
        torch.cuda.synchronize()
        return cycles / (began.elapsed_time(ended) * 1e-3)

    def begin(self, name: str, size: int, ranks: int, move: Callable[[], object]) -> Work:
        move()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(int(self.link.seconds(name, size, ranks) * self.cycles_per_second))
            ended = torch.cuda.Event()
            ended.record()
        return ended  # its `wait` makes the current stream wait


class Row:
    """One variant at one micro-batch size, measured mode by mode."""

    def __init__(self, variant: Variant, base: TrainConfig, micro_batch: int, mesh: Mesh, link: Link) -> None:
        train = base.train.model_copy(update={"micro_batch_size": micro_batch})
        self.variant, self.mesh, self.link, self.micro_batch = variant, mesh, link, micro_batch
        self.config = variant.config(base.model_copy(update={"train": train}))
        self.layers = self.config.model.layers
        self.seconds: dict[str, float] = {}
        self.reasons: dict[str, str] = {}
        self.extra: dict[str, Any] = {}

    def measure(self, mode: str, repeats: int, deadline: float, backend: str) -> None:
        """Fills in one mode: seconds of a step scaled to all layers, or why there are none."""
        if time.monotonic() > deadline:
            self.reasons[mode] = "out of time"
            return
        try:
            if mode == "eager":
                self.extra = self.costs()
            times = [self.step_seconds(layers, mode, repeats, backend) for layers in LAYERS]
        except Unsupported as reason:
            self.reasons[mode] = str(reason)
        except Exception as error:  # what fails on a device is a result of this script
            self.reasons[mode] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        else:
            block = (times[1] - times[0]) / (LAYERS[1] - LAYERS[0])
            self.seconds[mode] = times[0] + (self.layers - LAYERS[0]) * block
            self.extra.setdefault("block_seconds", {})[mode] = block
        finally:
            torch._dynamo.reset()
            if self.mesh.device.type == "cuda":
                torch.cuda.empty_cache()

    def costs(self) -> dict[str, Any]:
        """Collectives of one block, and what all of a step's would take with nothing beside them."""
        seen = []
        for layers in LAYERS:
            step = Step(self.config, self.mesh, layers)
            with count_collectives() as counted:
                step.run()
            check_replayed(step, VirtualClock(self.link))
            tp = self.mesh.tp.size
            seen.append(sum(self.link.seconds(c.name, c.bytes, tp) for c in counted))
        block = (seen[1] - seen[0]) / (LAYERS[1] - LAYERS[0])
        return {
            "communication_seconds": seen[0] + (self.layers - LAYERS[0]) * block,
            **per_block(self.config, self.mesh),
        }

    def step_seconds(self, layers: int, mode: str, repeats: int, backend: str) -> float:
        """Median seconds of forward and backward of a model of so many layers."""
        if "graph" in mode and self.mesh.device.type != "cuda":
            raise Unsupported("needs CUDA")
        step = Step(self.config, self.mesh, layers)
        if "compiled" in mode:
            if step.model.split_batch:
                raise Unsupported("halves that take turns do not run whole blocks, which is what is compiled")
            compile_blocks(step.model, backend)
        if self.mesh.device.type != "cuda":
            return virtual_seconds(step, self.link, repeats)
        with replayed(IdleLink(self.link)):
            return device_seconds(captured(step) if "graph" in mode else step.run, repeats)

    def result(self) -> dict[str, Any]:
        return {
            "name": self.variant.name,
            "layout": self.variant.layout,
            "options": self.variant.options,
            "micro_batch_size": self.micro_batch,
            "step_seconds": self.seconds,
            "not_measured": self.reasons,
            **self.extra,
        }


def compile_blocks(model: Decoder, backend: str) -> None:
    """torch.compile on every block; it stops at each collective."""
    for block in model.blocks:
        block.compile(backend=backend)


def virtual_seconds(step: Step, link: Link, repeats: int) -> float:
    """On a CPU: thread CPU time with the collectives replayed."""
    clock = VirtualClock(link)
    times = []
    with replayed(clock):
        for _ in range(repeats + 2):
            clock.start()
            step.run()
            times.append(clock.advance())
    return statistics.median(times[2:])


def device_seconds(run: Callable[[], object], repeats: int) -> float:
    """On a GPU: from one event to the next, the host waiting for neither in between."""
    for _ in range(3):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e-3 for a, b in pairwise(events))


def captured(step: Step) -> Callable[[], object]:
    """The step in a CUDA graph; gradients keep their place from one replay to the next."""

    def once() -> None:
        step.forward().backward()
        if step.model.queue is not None:
            step.model.queue.flush()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            once()
            step.model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return graph.replay


# --- Tables ---


def numerics_table(checks: list[dict[str, Any]]) -> str:
    lines = ["| layout | precision | loss error | worst gradient error | allowed | |", "|---|---|---|---|---|---|"]
    for check in checks:
        lines.append(
            f"| {check['layout']} | {check['precision']} | {check['loss_error']:.1e} "
            f"| {check['worst_gradient_error']:.1e} | {check['tolerance']:.0e} | {'ok' if check['passed'] else 'OFF'} |"
        )
    return "\n".join([*lines, "", "One block on one rank against fp64 on the CPU, relative in norm.", ""])


def table(content: dict[str, Any]) -> str:
    model, train, parallel = (content["config"][name] for name in ("model", "train", "parallel"))
    cost = content["collectives"]
    lines = [
        f"{content['device']}, torch {content['torch']}: one rank of tp {parallel['tp']}, "
        f"hidden {model['hidden_size']}, ffn {model['ffn_size']}, rank {model['rank']}, "
        f"sequence {train['sequence_length']}, {train['precision']}, forward and backward scaled from "
        f"{LAYERS[1] - LAYERS[0]} to {model['layers']} layers. Collectives REPLACED by "
        f"{cost['latency_seconds'] * 1e6:.0f} us + bytes / {cost['all_reduced_bytes_per_second'] / 1e9:.0f} GB/s; "
        f"compiled with {content['compiler']}.",
        "",
        f"| variant | micro-batch | {' | '.join(f'{mode} (ms)' for mode in MODES)} | collectives alone (ms) "
        "| over dense | over vanilla |",
        "|---" * (5 + len(MODES)) + "|",
    ]
    best = {
        (row["name"], row["micro_batch_size"]): min(row["step_seconds"].values(), default=None)
        for row in content["rows"]
    }
    for row in content["rows"]:
        cells = [row["name"], str(row["micro_batch_size"])]
        cells += [f"{row['step_seconds'][m] * 1e3:.2f}" if m in row["step_seconds"] else "-" for m in MODES]
        communication = row.get("communication_seconds")
        cells.append("-" if communication is None else f"{communication * 1e3:.2f}")
        mine = best[row["name"], row["micro_batch_size"]]
        for baseline in ("dense, overlap", "vanilla"):
            theirs = best[baseline, row["micro_batch_size"]]
            cells.append("-" if mine is None or theirs is None else f"{theirs / mine:.2f}x")
        lines.append("| " + " | ".join(cells) + " |")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in content["rows"]:
        for mode, reason in row["not_measured"].items():
            reasons.setdefault((mode, reason), []).append(f"{row['name']} ({row['micro_batch_size']})")
    lines += ["", "Ratios are between the best modes, over dense with its own overlap and over vanilla with A grouped."]
    if reasons:
        lines += ["", "| not measured | why | variants |", "|---|---|---|"]
        for (mode, reason), names in reasons.items():
            which = "all" if len(names) == len(content["rows"]) else "; ".join(names)
            lines.append(f"| {mode} | {reason} | {which} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
