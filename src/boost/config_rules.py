"""Which fields of a configuration go together: every rule, and what of the schema this version does not have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from boost.config_rules_methods import crossing_rules, factor_rules, loro_rules, relora_rules, sltrain_rules
from boost.config_violations import Violation, near_divisors, near_multiples

if TYPE_CHECKING:
    from boost.config import TrainConfig


def violations_of(config: TrainConfig) -> list[Violation]:
    """Everything that is wrong with a configuration whose fields are each of the right type."""
    return [
        *_model_rules(config),
        *_tensor_parallel_rules(config),
        *_baseline_rules(config),
        *_bridge_rules(config),
        *crossing_rules(config),
        *relora_rules(config),
        *sltrain_rules(config),
        *loro_rules(config),
        *factor_rules(config),
        *_zero_rules(config),
        *_training_rules(config),
        *_pipeline_rules(config),
        *_availability_rules(config),
    ]


def _model_rules(config: TrainConfig) -> Iterator[Violation]:
    model = config.model
    if model.heads % model.kv_heads:
        yield Violation(
            ("model.kv_heads", "model.heads"),
            "query heads cannot be shared out evenly",
            expected=f"a divisor of model.heads = {model.heads}",
            got=model.kv_heads,
            hint=f"nearest: {near_divisors(model.heads, model.kv_heads)}",
        )
    if "head_size" in model.model_fields_set:
        if model.head_size % 2:
            yield Violation(
                ("model.head_size",),
                "RoPE rotates pairs",
                expected="an even number",
                got=model.head_size,
                hint=f"nearest: {near_multiples(2, model.head_size)}",
            )
    elif model.hidden_size % (2 * model.heads):
        yield Violation(
            ("model.hidden_size", "model.heads", "model.head_size"),
            "does not give heads of an even size, as RoPE needs them",
            expected=f"a multiple of 2 x model.heads = {2 * model.heads}",
            got=model.hidden_size,
            hint=f"nearest: {near_multiples(2 * model.heads, model.hidden_size)}; or set model.head_size",
        )
    if model.linear == "dense" and model.rank is not None:
        yield Violation(("model.rank", "model.linear"), "a dense model has no rank", expected="null", got=model.rank)
    if model.linear != "dense" and not model.rank:
        yield Violation(
            ("model.rank", "model.hidden_size"),
            f"its default, model.hidden_size // 4, is 0 for model.hidden_size = {model.hidden_size}",
            expected="a whole number >= 1",
            got=0,
        )
    if model.factor_init != "cola" and model.linear != "low_rank":
        yield Violation(
            ("model.factor_init", "model.linear"),
            "is for the factors of low_rank linears",
            expected="cola",
            got=model.factor_init,
        )


def _tensor_parallel_rules(config: TrainConfig) -> Iterator[Violation]:
    """What tp must divide. MLP and vocabulary are padded, the rank is never split, vanilla repeats attention."""
    model, tp = config.model, config.parallel.tp
    if model.linear == "dense" and config.parallel.tensor_layout != "btp":
        yield Violation(
            ("parallel.tensor_layout", "model.linear"),
            "chooses how low-rank models are split; dense ones are always split as in Megatron",
            expected="no value with model.linear = dense",
            got=config.parallel.tensor_layout,
            hint="leave it out",
        )
    whole: dict[str, int] = {}
    if config.layout != "vanilla":
        whole["model.heads"] = model.heads
        if model.kv_heads != model.heads:
            whole["model.kv_heads"] = model.kv_heads
    if config.layout == "btp":
        whole["model.hidden_size"] = model.hidden_size
    for field, size in whole.items():
        if size % tp:
            yield Violation(
                ("parallel.tp", field, "model.heads", "model.linear", "parallel.tensor_layout"),
                f"the {config.layout} layout splits {field} = {size} over tp ranks",
                expected=f"a divisor of {size}",
                got=tp,
                hint=f"nearest that suits: {near_divisors(math.gcd(*whole.values()), tp)}",
            )


def _baseline_rules(config: TrainConfig) -> Iterator[Violation]:
    """What only one of the baselines has."""
    parallel = config.parallel
    if not parallel.group_b and config.layout not in ("vanilla", "vanilla_sharded_heads"):
        yield Violation(
            ("parallel.group_b", "model.linear", "parallel.tensor_layout"),
            "is about the wide all-reduces of the vanilla layouts",
            expected="true",
            got="false",
        )
    if parallel.sequence_parallel and (config.layout != "dense" or config.model.dropout or parallel.pp > 1):
        yield Violation(
            ("parallel.sequence_parallel", "model.linear", "model.dropout", "parallel.pp"),
            "is for dense models without dropout and without pipeline stages",
            expected="false",
            got="true",
        )


def _bridge_rules(config: TrainConfig) -> Iterator[Violation]:
    """Which forms of BTP's bridge go together."""
    parallel = config.parallel
    if parallel.bridge_dtype != "compute" and (
        config.layout != "btp" or parallel.overlap == "split_batch" or parallel.sequence_sharded_bottleneck
    ):
        yield Violation(
            (
                "parallel.bridge_dtype",
                "model.linear",
                "parallel.tensor_layout",
                "parallel.overlap",
                "parallel.sequence_sharded_bottleneck",
            ),
            "is for the plain bridges of BTP: not for split_batch, nor for bottlenecks sharded over tokens",
            expected="compute",
            got=parallel.bridge_dtype,
        )
    if parallel.sequence_sharded_bottleneck and (
        config.layout != "btp" or parallel.overlap == "split_batch" or parallel.norm == "sync"
    ):
        yield Violation(
            (
                "parallel.sequence_sharded_bottleneck",
                "model.linear",
                "parallel.tensor_layout",
                "parallel.overlap",
                "parallel.norm",
            ),
            "is for the bridges of BTP with the online norm, and not for split_batch",
            expected="false",
            got="true",
        )


def _zero_rules(config: TrainConfig) -> Iterator[Violation]:
    parallel = config.parallel
    if parallel.dp_replicate > 1 and parallel.zero == 0:
        yield Violation(
            ("parallel.dp_replicate", "parallel.zero"),
            "says how often what ZeRO shards is repeated, and parallel.zero = 0 shards nothing",
            expected="1",
            got=parallel.dp_replicate,
            hint="set parallel.zero to 1, 2 or 3",
        )
    elif parallel.dp % parallel.dp_replicate:
        yield Violation(
            ("parallel.dp_replicate", "parallel.dp"),
            "does not divide the data-parallel ranks into equal groups",
            expected=f"a divisor of parallel.dp = {parallel.dp}",
            got=parallel.dp_replicate,
            hint=f"nearest: {near_divisors(parallel.dp, parallel.dp_replicate)}",
        )
    elif parallel.dp == parallel.dp_replicate > 1:
        yield Violation(
            ("parallel.dp_replicate", "parallel.dp", "parallel.zero"),
            "leaves one rank in each group, with nobody to share with",
            expected=f"a divisor of parallel.dp = {parallel.dp} below it",
            got=parallel.dp_replicate,
            hint="or set parallel.zero=0 and leave it out",
        )
    if parallel.zero == 3 and parallel.overlap == "split_batch":
        yield Violation(
            ("parallel.zero", "parallel.overlap"),
            "split_batch runs two halves through all blocks at once, so their weights could not be freed in between",
            expected="0, 1 or 2",
            got=3,
        )


def micro_batch_size(config: TrainConfig) -> int:
    """As set, or the share of a data-parallel rank; under 1f1b cut so that there are as many as pipeline stages."""
    train, parallel = config.train, config.parallel
    if "micro_batch_size" in train.model_fields_set:
        return train.micro_batch_size
    sequences = train.global_batch_size // parallel.dp
    if parallel.pp == 1 or parallel.pipeline_schedule != "1f1b":
        return sequences
    return _largest_micro_batch(sequences, parallel.pp) or sequences


def _largest_micro_batch(sequences: int, stages: int) -> int:
    """The largest divisor that gives as many micro-batches as stages, 0 where there are fewer sequences."""
    small = [divisor for divisor in range(1, math.isqrt(sequences) + 1) if sequences % divisor == 0]
    counts = [count for divisor in small for count in (divisor, sequences // divisor) if count >= stages]
    return sequences // min(counts) if counts else 0


def _training_rules(config: TrainConfig) -> Iterator[Violation]:
    train, dp = config.train, config.parallel.dp
    unit, unit_text = dp, f"parallel.dp = {dp}"
    if "micro_batch_size" in train.model_fields_set:
        unit = dp * train.micro_batch_size
        unit_text = f"parallel.dp x train.micro_batch_size = {dp} x {train.micro_batch_size} = {unit}"
    if train.global_batch_size % unit:
        yield Violation(
            ("train.global_batch_size", "parallel.dp", "train.micro_batch_size"),
            "is not a whole number of micro-batches on every data-parallel rank",
            expected=f"a multiple of {unit_text}",
            got=train.global_batch_size,
            hint=f"nearest: {near_multiples(unit, train.global_batch_size)}",
        )
    if config.parallel.overlap == "split_batch":
        if config.layout != "btp" or config.parallel.norm == "sync" or train.recompute == "block":
            yield Violation(
                ("parallel.overlap", "model.linear", "parallel.tensor_layout", "parallel.norm", "train.recompute"),
                "two halves can only take turns at the bridges of BTP with the online norm, and not in whole blocks "
                "that are recomputed",
                expected="none or weight_grads",
                got="split_batch",
            )
        micro = micro_batch_size(config)
        if micro < 2:
            yield Violation(
                ("parallel.overlap", "train.micro_batch_size"),
                "one sequence has no two halves",
                expected="train.micro_batch_size of at least 2",
                got=micro,
            )
    if train.compile and config.parallel.overlap == "weight_grads":
        yield Violation(
            ("train.compile", "parallel.overlap"),
            "compiled code computes weight gradients where it stands and cannot put them off",
            expected="false, or parallel.overlap of none or split_batch",
            got="true",
        )
    if train.compile and config.model.dropout:
        yield Violation(
            ("train.compile", "model.dropout"),
            "what is compiled has no dropout masks in it",
            expected="false, or model.dropout = 0",
            got="true",
        )
    for name in ("sequence_sharded_bottleneck", "sequence_parallel"):
        if train.compile and getattr(config.parallel, name):
            yield Violation(
                ("train.compile", f"parallel.{name}"),
                "what is sharded over tokens is gathered in the middle of what would be compiled",
                expected=f"false, or parallel.{name} = false",
                got="true",
            )
    if train.recompute == "latent" and config.layout == "dense":
        yield Violation(
            ("train.recompute", "model.linear"),
            f"a {config.model.linear} model has no chunks between latents to repeat",
            expected="none or block",
            got="latent",
        )
    if config.optimizer.exact_every is not None and config.optimizer.name != "loro":
        yield Violation(
            ("optimizer.exact_every", "optimizer.name"),
            f"only LORO has exact steps, and optimizer.name = {config.optimizer.name}",
            expected="null",
            got=config.optimizer.exact_every,
        )


# Schedules in which every rank has more than one stage.
STAGES_PER_RANK: Mapping[str, int] = {"interleaved_1f1b": 2, "zbv": 2}
# Those that run weight gradients apart, to fill their bubbles.
ZERO_BUBBLE = ("zero_bubble", "zbv")


def _pipeline_rules(config: TrainConfig) -> Iterator[Violation]:
    train, parallel, layers = config.train, config.parallel, config.model.layers
    pp, schedule = parallel.pp, parallel.pipeline_schedule
    if pp == 1:
        return
    per_rank = config.stages // pp
    if layers < config.stages:
        yield Violation(
            ("parallel.pp", "model.layers", "parallel.pipeline_schedule"),
            f"{schedule} cuts model.layers = {layers} into pp x {per_rank} = {config.stages} stages, none empty",
            expected=f"at most {layers // per_rank}",
            got=pp,
        )
    if schedule in ZERO_BUBBLE and parallel.overlap == "weight_grads":
        yield Violation(
            ("parallel.overlap", "parallel.pipeline_schedule", "parallel.pp"),
            f"weight gradients fill the bubbles of {schedule}, so they cannot hide all-reduces as well",
            expected="none or split_batch",
            got=parallel.overlap,
        )
    if schedule in ZERO_BUBBLE and parallel.zero == 3 and parallel.dp > 1:
        yield Violation(
            ("parallel.zero", "parallel.pipeline_schedule", "parallel.pp"),
            f"{schedule} puts weight gradients off, and they need weights that stage 3 has freed by then",
            expected="0, 1 or 2",
            got=parallel.zero,
        )
    if schedule in ZERO_BUBBLE and parallel.zero == 2 and parallel.dp_replicate > 1:
        yield Violation(
            ("parallel.dp_replicate", "parallel.pipeline_schedule", "parallel.zero"),
            f"{schedule} may have nothing left to reduce in the step's last pass, where replicas would be summed",
            expected="1",
            got=parallel.dp_replicate,
            hint="or set parallel.zero=1",
        )
    if schedule in ZERO_BUBBLE and train.recompute != "none":
        yield Violation(
            ("train.recompute", "parallel.pipeline_schedule", "parallel.pp"),
            f"{schedule} keeps until later what weight gradients need, recomputed or not, so nothing would be saved",
            expected="none",
            got=train.recompute,
        )
    if schedule in ZERO_BUBBLE and train.compile:
        yield Violation(
            ("train.compile", "parallel.pipeline_schedule", "parallel.pp"),
            f"{schedule} puts weight gradients off, which compiled code cannot do",
            expected="false",
            got="true",
        )
    sequences = train.global_batch_size // parallel.dp
    micro = micro_batch_size(config)
    if sequences == 0 or sequences % micro:
        return  # _training_rules says so
    count = sequences // micro
    rounds = max(1, count // pp)
    fields = ("train.micro_batch_size", "train.global_batch_size", "parallel.dp", "parallel.pp")
    fits = _largest_micro_batch(sequences, pp)
    if schedule == "1f1b" and count < pp:
        yield Violation(
            (*fields, "parallel.pipeline_schedule"),
            f"with parallel.pp = {pp}, 1f1b needs {pp} or more micro-batches of the {sequences} sequences of a dp rank",
            expected=f"at most {fits}" if fits else f"train.global_batch_size of at least {pp * parallel.dp}",
            got=micro if fits else train.global_batch_size,
            hint=f"set train.micro_batch_size={fits}" if fits else f"set train.global_batch_size={pp * parallel.dp}",
        )
    if schedule in ("interleaved_1f1b", "zero_bubble") and count % rounds:
        yield Violation(
            (*fields, "parallel.pipeline_schedule"),
            f"{schedule} takes the {count} micro-batches of a step in {count} // pp = {rounds} equal rounds",
            expected=f"a multiple of {rounds} micro-batches",
            got=count,
            hint=f"nearest: {near_multiples(rounds, count)}",
        )


# Fields with values that are part of the schema but not of this version, and the values that are available.
NOT_AVAILABLE: Mapping[str, tuple[object, ...]] = {
    "logging.wandb": (False,),
    "logging.trackio": (False,),
}


def _availability_rules(config: TrainConfig) -> Iterator[Violation]:
    for name, available in NOT_AVAILABLE.items():
        section, _, field = name.partition(".")
        value = getattr(getattr(config, section), field)
        if value not in available:
            choices = ", ".join(str(choice).lower() for choice in available)
            yield Violation((name,), f"{str(value).lower()} is not available in this version (available: {choices})")
