"""CoLA-60m in one process of two threads: BOOST beside a plain `transformers` LLaMA, alternated in one run.

The other side is `LlamaForCausalLM` with each block's seven linears replaced by modules A, SiLU, B: fp32 weights,
`torch.autocast` for bf16, the loss from the model's own `labels` path, gradient clipping and fused AdamW as BOOST has
them. Both train the same random tokens from the same weights, and the script first checks that both see the same loss.
A step is forward, backward, clipping and update. Peak memory is taken of each side in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from boost.config import ModelSection, TrainConfig
from boost.parallel.mesh import Mesh
from boost.parallel.sharding import described
from boost.training.batches import Batch, MicroBatch
from boost.training.loop import build_model, update
from boost.training.optimizers.adamw import build_adamw

SEQUENCE, BATCH, THREADS, LR = 256, 8, 2, 1e-3
# Of the loss before the first step: the same sum in another order.
LOSS_TOLERANCE = {"fp32": 2e-5, "bf16": 2e-3}
TARGETS = {"fp32": 1.25, "bf16": 1.6}
MEMORY_TARGET = 0.7
SIDES = ("boost", "compiled", "transformers")
# One step on a batch of token ids [batch, sequence]: the mean loss.
Step = Callable[[Tensor], float]


class Pair(nn.Module):
    """y = silu(x A) B, in place of a linear."""

    def __init__(self, dense: nn.Linear, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(dense.in_features, rank, bias=False)
        self.up = nn.Linear(rank, dense.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(nn.functional.silu(self.down(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each side, in turns (default 7)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "both"), default="both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--profile", action="store_true", help="print where BOOST's step spends its time, and stop")
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    precisions = ("fp32", "bf16") if arguments.precision == "both" else (arguments.precision,)
    if arguments.memory_of:
        print(json.dumps({"bytes": memory_of(arguments.memory_of, precisions[0])}))
        return
    if arguments.profile:
        for precision in precisions:
            print(profile(precision))
        return
    rows = [measure(precision, arguments.steps) for precision in precisions]
    print(table(rows))
    if arguments.json:
        content = {"torch": torch.__version__, "threads": THREADS, "sequence": SEQUENCE, "batch": BATCH, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def measure(precision: str, steps: int) -> dict[str, Any]:
    """One row: the loss of both, their memory, then timed steps in turns."""
    sides, losses, times = {name: side(name, precision) for name in SIDES}, {}, {name: [] for name in SIDES}
    for number in range(steps + 2):
        tokens = batch(number)
        for name, step in sides.items():
            began = time.perf_counter()
            loss = step(tokens)
            if number == 0:
                losses[name] = loss
            if number >= 2:
                times[name].append(time.perf_counter() - began)
        if number == 0:
            difference = max(abs(losses[name] / losses["transformers"] - 1) for name in SIDES)
            if not difference <= LOSS_TOLERANCE[precision]:
                sys.exit(f"error: {precision}: the two do not compute the same loss from the same weights: {losses}")
    seconds = {name: statistics.median(times[name]) for name in SIDES}
    memory = {name: memory_in_subprocess(name, precision) for name in SIDES}
    return {
        "precision": precision,
        "loss": losses,
        "step_seconds": seconds,
        "all_step_seconds": times,
        "tokens_per_second": {name: BATCH * SEQUENCE / seconds[name] for name in SIDES},
        "speed_ratio": {name: seconds["transformers"] / seconds[name] for name in SIDES},
        "speed_target": TARGETS[precision],
        "peak_bytes": memory,
        "memory_ratio": {name: memory[name] / memory["transformers"] for name in SIDES},
        "memory_target": MEMORY_TARGET,
    }


def side(name: str, precision: str) -> Step:
    """A fresh model of one side, from the seed's weights, with its optimiser."""
    return transformers_step(precision) if name == "transformers" else boost_step(precision, name == "compiled")


def boost_config(precision: str, *, compile: bool = False) -> TrainConfig:
    """The shipped preset; only sizes of the run are ours."""
    return TrainConfig.load(
        "cola-60m",
        [
            f"train.sequence_length={SEQUENCE}",
            f"train.global_batch_size={BATCH}",
            f"train.micro_batch_size={BATCH}",
            f"train.precision={precision}",
            f"train.compile={str(compile).lower()}",
            "train.device=cpu",
        ],
    )


def boost_step(precision: str, compile: bool) -> Step:
    """BOOST's own training step."""
    config, mesh = boost_config(precision, compile=compile), Mesh()
    model = build_model(config, mesh)
    optimizer = build_adamw(model, config.optimizer)

    def step(tokens: Tensor) -> float:
        # The last token has no successor in the batch; transformers' labels path leaves it out as well.
        labels = torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), -100)], dim=1)
        data = Batch([MicroBatch(tokens, labels, range(len(tokens)))], int((labels != -100).sum()), "")
        return update(model, optimizer, data, LR, config.optimizer.clip, mesh, 1)[0]

    return step


def transformers_step(precision: str) -> Step:
    """The same step as one writes it with `transformers`."""
    config = boost_config(precision)
    model = low_rank_llama(config)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), LR, settings.betas, settings.eps, settings.weight_decay, fused=True
    )

    def step(tokens: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def low_rank_llama(config: TrainConfig) -> LlamaForCausalLM:
    """transformers' LLaMA of the preset's shape, its linears replaced by pairs, with BOOST's initial weights."""
    section: ModelSection = config.model
    assert section.rank is not None
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=section.vocab_size,
            hidden_size=section.hidden_size,
            intermediate_size=section.ffn_size,
            num_hidden_layers=section.layers,
            num_attention_heads=section.heads,
            num_key_value_heads=section.kv_heads,
            hidden_act="silu",
            rms_norm_eps=section.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": section.rope_theta},
            tie_word_embeddings=section.tie_embeddings,
            attn_implementation="sdpa",
        )
    )
    for layer in llama.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Pair(child, section.rank))
    ours, mesh = build_model(config, Mesh()), Mesh()
    weights = {
        transformers_name(part.name): part.view(parameter.detach(), mesh.tp)
        for parameter, parts in described(ours)
        for part in parts
    }
    llama.load_state_dict(weights)
    return llama.train()


def transformers_name(name: str) -> str:
    """A canonical name as transformers spells it."""
    if name == "head.weight":
        return "lm_head.weight"
    name = name.replace("embedding.weight", "embed_tokens.weight").replace("blocks.", "layers.")
    name = name.replace("attention.norm", "input_layernorm").replace("mlp.norm", "post_attention_layernorm")
    for linear in "qkvo":
        name = name.replace(f"attention.{linear}.", f"self_attn.{linear}_proj.")
    for linear in ("gate", "up", "down"):
        name = name.replace(f"mlp.{linear}.", f"mlp.{linear}_proj.")
    return f"model.{name}"


def batch(number: int) -> Tensor:
    """Random token ids, the same on both sides."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(32000, (BATCH, SEQUENCE), generator=generator)


def memory_of(name: str, precision: str) -> int:
    """Bytes by which three steps raise this process's peak over what it has after its imports."""
    resident = status_bytes("VmRSS")
    step = side(name, precision)
    for number in range(3):
        step(batch(number))
    return status_bytes("VmHWM") - resident


def status_bytes(field: str) -> int:
    """A field of /proc/self/status. (The peak that getrusage reports is inherited from the parent process.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def memory_in_subprocess(name: str, precision: str) -> int:
    command = [sys.executable, __file__, "--memory-of", name, "--precision", precision]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: memory of {name} in {precision}: {done.stderr.strip()}")
    return int(json.loads(done.stdout.splitlines()[-1])["bytes"])


def profile(precision: str) -> str:
    """Time by operator of three of BOOST's steps."""
    step = side("boost", precision)
    step(batch(0))
    with torch.profiler.profile(record_shapes=True) as seen:
        for number in range(3):
            step(batch(number))
    averages = seen.key_averages(group_by_input_shape=True)
    return averages.table(
        sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=40, max_shapes_column_width=60
    )


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"CoLA-60m, sequence {SEQUENCE}, batch {BATCH}, one process of {THREADS} threads, torch {torch.__version__}; "
        f"medians of {len(rows[0]['all_step_seconds']['boost'])} steps each, in turns.",
        "",
        "| precision | side | tokens/s | over transformers | target | peak (MB) | of transformers | target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    labels = {"boost": "BOOST", "compiled": "BOOST, compiled", "transformers": "transformers"}
    for row in rows:
        for name, label in labels.items():
            speed, memory = (f">= {row['speed_target']}x", f"<= {row['memory_target']}x")
            if name == "transformers":
                speed = memory = ""
            lines.append(
                f"| {row['precision']} | {label} | {row['tokens_per_second'][name]:,.0f} "
                f"| {row['speed_ratio'][name]:.2f}x | {speed} | {row['peak_bytes'][name] / 1e6:,.0f} "
                f"| {row['memory_ratio'][name]:.2f}x | {memory} |"
            )
    lines += [
        "",
        "Peak memory: of a process of its own, over what it holds after its imports; weights, gradients, moments.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
