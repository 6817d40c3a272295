"""What each method goes with: LaX crossings, ReLoRA, SLTrain, and the optimisers of factors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from boost.config_violations import Violation, near_multiples

if TYPE_CHECKING:
    from boost.config import TrainConfig


def crossing_rules(config: TrainConfig) -> Iterator[Violation]:
    """Crossings are exact wherever bottlenecks are whole on every rank and all of a block's neighbours are at hand."""
    model, parallel = config.model, config.parallel
    if model.crossing == "none":
        return
    refused = {
        "model.linear": (model.linear != "low_rank", "is for the bottlenecks of low_rank linears"),
        "parallel.tensor_layout": (
            config.layout.startswith("vanilla"),
            "needs bottlenecks whole, and vanilla layouts split them",
        ),
        "parallel.sequence_sharded_bottleneck": (
            parallel.sequence_sharded_bottleneck,
            "has gates and norms whose gradients would be of this rank's tokens alone in sequence_sharded_bottleneck",
        ),
        "parallel.overlap": (
            parallel.overlap == "split_batch",
            "hands bottlenecks from block to block, and split_batch hands on the residual stream alone",
        ),
        "train.compile": (config.train.compile, "is outside of what train.compile compiles"),
    }
    for field, (broken, reason) in refused.items():
        if broken:
            yield Violation(("model.crossing", field), reason, expected="none", got=model.crossing)


def relora_rules(config: TrainConfig) -> Iterator[Violation]:
    """ReLoRA: a frozen wide matrix, which decides the layout, and restarts that the schedule prepares."""
    model, optimizer, schedule, train = config.model, config.optimizer, config.schedule, config.train
    every, again = optimizer.restart_every, schedule.restart_warmup_steps
    if model.linear != "relora":
        if every is not None:
            yield Violation(
                ("optimizer.restart_every", "model.linear"),
                f"only ReLoRA merges its factors, and model.linear = {model.linear}",
                expected="null",
                got=every,
            )
        if model.lora_dropout:
            yield Violation(
                ("model.lora_dropout", "model.linear"), "is for relora", expected="0", got=model.lora_dropout
            )
        return
    if config.parallel.tensor_layout != "btp":
        yield Violation(
            ("parallel.tensor_layout", "model.linear"),
            "chooses where a rank-wide tensor is all-reduced, and ReLoRA's frozen matrices are wide: it is always "
            "split as in Megatron",
            expected="no value with model.linear = relora",
            got=config.parallel.tensor_layout,
            hint="leave it out",
        )
    if config.parallel.sequence_parallel:
        yield Violation(
            ("parallel.sequence_parallel", "model.linear"), "is for dense models", expected="false", got="true"
        )
    if train.compile:
        yield Violation(
            ("train.compile", "model.linear"), "is for dense and low_rank blocks", expected="false", got="true"
        )
    if (every is not None) != (schedule.name == "jagged_cosine"):
        yield Violation(
            ("optimizer.restart_every", "schedule.name", "model.linear"),
            "ReLoRA restarts where jagged_cosine is 0, and jagged_cosine is 0 where ReLoRA restarts",
            expected="both or neither",
            got=f"{'null' if every is None else every} and {schedule.name}",
        )
    if every is None or schedule.name != "jagged_cosine":
        return
    if train.steps % every:
        yield Violation(
            ("train.steps", "optimizer.restart_every"),
            "is not a whole number of restarts",
            expected=f"a multiple of optimizer.restart_every = {every}",
            got=train.steps,
            hint=f"nearest: {near_multiples(every, train.steps)}",
        )
    if schedule.warmup_steps > every:
        yield Violation(
            ("schedule.warmup_steps", "optimizer.restart_every"),
            "is still warming up when ReLoRA restarts",
            expected=f"at most optimizer.restart_every = {every}",
            got=schedule.warmup_steps,
        )
    if not 1 <= again < every:
        yield Violation(
            ("schedule.restart_warmup_steps", "optimizer.restart_every"),
            "starts at 0, where ReLoRA merges, and ends before it does so again",
            expected=f"at least 1 and less than optimizer.restart_every = {every}",
            got=again,
        )


def sltrain_rules(config: TrainConfig) -> Iterator[Violation]:
    """SLTrain is built for plain BTP; its supports must have entries, and blocks that nothing cuts."""
    model, parallel = config.model, config.parallel
    if model.linear != "sltrain":
        return
    refused: dict[str, tuple[str, str, bool]] = {
        "parallel.tensor_layout": (
            "btp",
            "splits the rank, and the input of sparse parts is split otherwise",
            config.layout != "btp",
        ),
        "parallel.bridge_dtype": ("compute", "is not for the bridges of sltrain", parallel.bridge_dtype != "compute"),
        "parallel.sequence_sharded_bottleneck": (
            "false",
            "keeps latents sharded over tokens, which sltrain's norm for its sparse part is not",
            parallel.sequence_sharded_bottleneck,
        ),
        "parallel.overlap": (
            "none or weight_grads",
            "takes turns at bridges alone, and sltrain's sparse parts need more than those",
            parallel.overlap == "split_batch",
        ),
        "train.compile": ("false", "does not compile sltrain blocks", config.train.compile),
        "train.recompute": (
            "none or block",
            "keeps latents alone, from which sparse parts cannot be computed again",
            config.train.recompute == "latent",
        ),
    }
    for field, (expected, reason, broken) in refused.items():
        if broken:
            section, _, name = field.partition(".")
            got = getattr(getattr(config, section), name)
            yield Violation((field, "model.linear"), reason, expected=expected, got=str(got).lower())
    widths = {
        "model.hidden_size": model.hidden_size,
        "model.ffn_size": model.ffn_size,
        "model.heads x model.head_size": model.heads * model.head_size,
        "model.kv_heads x model.head_size": model.kv_heads * model.head_size,
    }
    smallest = model.hidden_size * min(widths.values())
    if model.sparse_density * smallest < 1:
        yield Violation(
            ("model.sparse_density", *_names(widths)),
            f"gives the smallest linear, of {smallest} entries, none",
            expected=f"at least {1 / smallest:.3g}",
            got=model.sparse_density,
        )
    if model.sparse_support != "block_diagonal":
        return
    blocks = model.sparse_blocks
    for field, width in widths.items():
        if width % blocks:
            yield Violation(
                ("model.sparse_blocks", *_names([field])),
                f"does not divide {field} = {width} into equal blocks",
                expected=f"a divisor of {math.gcd(*widths.values())}",
                got=blocks,
            )
            return
    if blocks % parallel.tp:
        yield Violation(
            ("model.sparse_blocks", "parallel.tp"),
            f"cannot be shared out over parallel.tp = {parallel.tp} ranks without cutting a block",
            expected=f"a multiple of {parallel.tp}",
            got=blocks,
        )
    if model.sparse_density * blocks > 1:
        yield Violation(
            ("model.sparse_density", "model.sparse_blocks"),
            f"is more than {blocks} blocks on the diagonal have, 1 / {blocks} of all entries",
            expected=f"at most {1 / blocks:.4g}",
            got=model.sparse_density,
        )


def loro_rules(config: TrainConfig) -> Iterator[Violation]:
    """LORO moves products B A of whole rank, and turns the bases of their factors."""
    model, optimizer = config.model, config.optimizer
    if config.schedule.name == "jagged_cosine" and optimizer.name != "loro" and model.linear != "relora":
        yield Violation(
            ("schedule.name", "optimizer.name", "model.linear"),
            "jagged_cosine warms up again after every exact step of LORO, or every restart of ReLoRA",
            expected="cosine, linear or constant, or optimizer.name = loro, or model.linear = relora",
            got="jagged_cosine",
        )
    jagged = config.schedule.name == "jagged_cosine" and model.linear != "relora"
    if jagged and config.train.steps < 2 * config.schedule.warmup_steps:
        yield Violation(
            ("schedule.warmup_steps", "schedule.name", "train.steps"),
            "jagged_cosine rises for twice as long before it falls, longer than the run",
            expected=f"at most train.steps / 2 = {config.train.steps // 2}",
            got=config.schedule.warmup_steps,
        )
    if optimizer.name != "loro":
        return
    if optimizer.exact_every is None:
        yield Violation(
            ("optimizer.exact_every", "optimizer.name"),
            "LORO needs the number of steps between two exact ones",
            expected="a whole number >= 1",
            got="null",
            hint="the published runs have 500, or 200 at 1B",
        )
    if model.linear != "low_rank" or model.bottleneck_activation != "none" or model.crossing != "none":
        yield Violation(
            ("optimizer.name", "model.linear", "model.bottleneck_activation", "model.crossing"),
            "loro turns the bases of bottlenecks, which changes the model unless nothing but a product stands there",
            expected="model.linear = low_rank with model.bottleneck_activation = none and model.crossing = none",
            got="loro",
        )
        return
    widths = {
        "model.hidden_size": model.hidden_size,
        "model.ffn_size": model.ffn_size,
        "model.kv_heads x model.head_size": model.kv_heads * model.head_size,
    }
    narrowest = min(widths, key=lambda name: widths[name])
    if model.rank is not None and model.rank > widths[narrowest]:
        yield Violation(
            ("model.rank", "optimizer.name", *narrowest.split(" x ")),
            f"no factor of {narrowest} = {widths[narrowest]} rows has so large a rank, which loro needs",
            expected=f"at most {widths[narrowest]}",
            got=model.rank,
        )


def factor_rules(config: TrainConfig) -> Iterator[Violation]:
    """What both optimisers of factors need."""
    name = config.optimizer.name
    if name == "muon" and config.model.linear != "low_rank":
        yield Violation(
            ("optimizer.name", "model.linear"),
            "muon is for the factors of low-rank linears",
            expected="adamw, or model.linear = low_rank",
            got="muon",
        )
    elif name != "adamw" and config.parallel.tp > 1 and config.layout in ("vanilla", "vanilla_sharded_heads"):
        yield Violation(
            ("optimizer.name", "parallel.tensor_layout", "parallel.tp"),
            f"{name} needs the rank of a factor whole on every rank, and {config.layout} divides it over tp",
            expected="adamw, parallel.tensor_layout = btp or parallel.tp = 1",
            got=name,
        )


def _names(widths: Iterable[str]) -> list[str]:
    """The fields that widths are products of, each once."""
    return list(dict.fromkeys(field for width in widths for field in width.split(" x ")))
