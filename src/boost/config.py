"""The configuration: one class per section, the rules between fields, and how it is loaded and written.

A configuration is a YAML file with the sections below, `extends: other.yaml` (or a preset's name) for what it
shares with another one, and `section.field=value` overrides from the command line. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from boost.config_loader import (
    COUNT_MAX,
    ConfigError,
    Layer,
    RulesBroken,
    Violation,
    build,
    dump_yaml,
    preset_names,
    read_layers,
    read_overrides,
)

__all__ = [
    "CheckpointSection",
    "ConfigError",
    "DataSection",
    "LoggingSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "RunSection",
    "ScheduleSection",
    "TrainConfig",
    "TrainSection",
    "preset_names",
]

Size = Annotated[int, Field(ge=1, le=COUNT_MAX)]
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    """Unknown fields, coerced types (`"3"`, `true` for 1), NaN and infinity are all refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # Fields whose default follows from other fields: null there means the default.
    derived: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.derived}


def _default_rank(data: Mapping[str, Any]) -> int | None:
    return None if data["linear"] == "dense" else data["hidden_size"] // 4


class ModelSection(_Section):
    """The decoder's architecture and sizes."""

    derived = frozenset({"kv_heads", "head_size", "rank"})

    linear: Literal["dense", "low_rank", "sltrain", "relora"] = Field(
        default="low_rank",
        description="what each of a block's seven linears is: one matrix, or y = act(x A) B and its relatives",
    )
    hidden_size: Size = Field(description="width d of the residual stream")
    ffn_size: Size = Field(description="width of the MLP; padded where tp does not divide it")
    layers: Size = Field(description="number of decoder blocks")
    heads: Size = Field(description="number of query heads")
    kv_heads: Size = Field(
        default_factory=lambda data: data["heads"], description="number of key and value heads; default: heads (no GQA)"
    )
    head_size: Size = Field(
        default_factory=lambda data: data["hidden_size"] // data["heads"],
        description="width of one head, even for RoPE; default: hidden_size / heads",
    )
    vocab_size: Size = Field(description="number of token ids; padded where tp does not divide it")
    rank: Size | None = Field(
        default_factory=_default_rank,
        description="width r of every bottleneck; default: hidden_size // 4 (CoLA); not for dense",
    )
    bottleneck_activation: Literal["silu", "none"] = Field(
        default="silu", description="activation on the rank-wide tensor: silu is CoLA, none is SVD; only for low_rank"
    )
    gate_activation: Literal["silu", "none"] = Field(
        default="silu", description="activation of the MLP's gate: CoLA has silu at 60m and 130m, none from 350m on"
    )
    crossing: Literal["none", "identity", "diagonal", "dense", "tensor"] = Field(
        default="none", description="how a bottleneck takes up the one of the block before (LaX gates)"
    )
    tie_embeddings: bool = Field(default=False, description="use the embedding's weight as the head's")
    norm_eps: Positive = Field(default=1e-6, description="added to the mean square in RMSNorm; default: LLaMA")
    rope_theta: Positive = Field(default=10000.0, description="base of the rotary frequencies; default: LLaMA")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="probability with which the block outputs are dropped")
    attention_bias: bool = Field(default=False, description="biases on q, k, v and o")
    mlp_bias: bool = Field(default=False, description="biases on gate, up and down")
    init_std: Positive = Field(
        default=0.02, description="standard deviation of the initial embedding, head and dense linears; default: LLaMA"
    )


class DataSection(_Section):
    """The tokenised dataset and the order in which it is read."""

    path: Text | None = Field(default=None, description="folder made by `boost data prepare`")
    seed: Seed = Field(default=0, description="seed of the order of the sequences")
    num_workers: Count = Field(default=0, description="threads that read ahead, one step each; 0 = read when needed")


class OptimizerSection(_Section):
    """How a gradient becomes an update. The defaults are torch's AdamW, but for the clipping."""

    name: Literal["adamw", "muon", "loro"] = Field(default="adamw", description="the optimiser")
    lr: Positive = Field(default=1e-3, description="peak learning rate")
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.999), description="decay of Adam's first and second moment, per step"
    )
    eps: Positive = Field(default=1e-8, description="added to the root of Adam's second moment")
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled weight decay, times the learning rate")
    decay_norms: bool = Field(default=False, description="decay norm gains and biases as well (CoLA: true)")
    clip: Positive | None = Field(default=1.0, description="largest norm of the global gradient; null = no clipping")
    exact_every: Size | None = Field(default=None, description="steps between two exact LORO steps; only for loro")


class ScheduleSection(_Section):
    """The learning rate over the run, as a factor of `optimizer.lr`."""

    name: Literal["cosine", "linear", "constant", "jagged_cosine"] = Field(
        default="cosine", description="shape after the warm-up"
    )
    warmup_steps: Count = Field(default=0, description="steps of linear warm-up from 0; a shorter run ends within it")
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="last learning rate / peak; default: CoLA")


class TrainSection(_Section):
    """Length, batch and numerics of the run."""

    derived = frozenset({"micro_batch_size"})

    steps: Count = Field(default=1000, description="optimiser steps")
    sequence_length: Size = Field(default=256, description="tokens per sequence; default: the C4/LLaMA lineage")
    global_batch_size: Size = Field(default=8, description="sequences per optimiser step, over all ranks")
    micro_batch_size: Size = Field(
        default_factory=lambda data: data["global_batch_size"],  # TrainConfig divides it by dp
        description="sequences per forward pass of one data-parallel rank; default: global_batch_size / dp",
    )
    seed: Seed = Field(default=0, description="seed of the initial weights and of dropout")
    precision: Literal["bf16", "fp32", "fp64"] = Field(
        default="bf16", description="type of compute; master weights are fp32, or fp64 under fp64"
    )
    recompute: Literal["none", "block", "latent"] = Field(
        default="none", description="what backward computes again: nothing, whole blocks, or chunks without collectives"
    )
    compile: bool = Field(default=False, description="compile the blocks with torch.compile")
    validate_every: Count = Field(
        default=0, description="steps between validations, with one before the first step and one at the end; 0 = never"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto = cuda if there is one, else cpu")


class ParallelSection(_Section):
    """How model and batch are divided over ranks; world size = tp x pp x dp."""

    tp: Size = Field(default=1, description="tensor-parallel ranks")
    pp: Size = Field(default=1, description="pipeline-parallel ranks")
    dp: Size = Field(default=1, description="data-parallel ranks")
    zero: int = Field(
        default=0,
        ge=0,
        le=3,
        description="ZeRO stage: what data-parallel ranks share instead of repeat; no effect with dp = 1",
    )
    tensor_layout: Literal["btp", "vanilla", "vanilla_sharded_heads"] = Field(
        default="btp", description="how low-rank linears are split over tp; for dense (always Megatron) leave it out"
    )
    norm: Literal["online", "sync"] = Field(
        default="online",
        description="btp's RMSNorm: statistic in the bridge or by a second all-reduce; no effect elsewhere (local)",
    )
    group_linears: bool = Field(default=True, description="one GEMM for q, k, v and one for gate, up")
    group_b: bool = Field(
        default=True, description="vanilla: grouped linears share the all-reduce of B too; false = one for each B"
    )
    sequence_parallel: bool = Field(
        default=False, description="dense: residual stream and norms sharded over tokens (Megatron)"
    )
    overlap: Literal["none", "weight_grads", "split_batch"] = Field(
        default="none", description="what hides the collectives: weight gradients, or the other half of the micro-batch"
    )
    bridge_dtype: Literal["compute", "fp32", "int8", "fp8"] = Field(
        default="compute",
        description="btp's r-wide tensors on the wire: as computed, or widened; int8 and fp8 are lossy, the norm exact",
    )
    sequence_sharded_bottleneck: bool = Field(
        default=False,
        description="btp: keep bottlenecks sharded over tokens; recompute latent then repeats all-gathers",
    )
    dp_replicate: Size = Field(default=1, description="groups of dp ranks that repeat what ZeRO shards inside each")
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"] = Field(
        default="1f1b", description="order of micro-batches in the pipeline; no effect with pp = 1"
    )
    timeout_seconds: Size = Field(
        default=120,
        description="seconds until a collective that some rank does not reach fails; "
        "five times as many while starting, in the first step and while saving",
    )

    @property
    def shards(self) -> int:
        """Over how many dp ranks ZeRO divides."""
        return self.dp // self.dp_replicate if self.zero else 1


class CheckpointSection(_Section):
    """When the state is saved, and how much of it is kept."""

    every: Count = Field(default=1000, description="steps between checkpoints; 0 = only at the end")
    keep: Count = Field(default=3, description="newest checkpoints to keep; 0 = all")
    asynchronous: bool = Field(default=False, description="write while training goes on")
    verify: bool = Field(default=True, description="check sizes and SHA-256 when loading")


def _false_as_text(value: object) -> object:
    return "false" if value is False else value


class RunSection(_Section):
    """The run directory, and where the run starts from."""

    dir: Text = Field(default="runs/default", description="folder of the run")
    resume: Annotated[Literal["auto", "false"], BeforeValidator(_false_as_text)] = Field(
        default="auto",
        description="auto = go on from the newest complete checkpoint in dir; false = refuse such a dir",
    )
    init_from: Text | None = Field(default=None, description="checkpoint whose weights start a fresh run")


class LoggingSection(_Section):
    """What is reported besides metrics.jsonl, and how often."""

    every: Size = Field(default=10, description="steps between two lines on the console")
    tensorboard: bool = Field(default=True, description="write TensorBoard scalars to the run directory")
    plots: bool = Field(default=True, description="draw loss and throughput at the end; needs the extra `report`")
    wandb: bool = Field(default=False, description="report to Weights & Biases; its key comes from the environment")
    trackio: bool = Field(default=False, description="report to Trackio")


class TrainConfig(_Section):
    """All of a run's configuration. Immutable; every default is filled in."""

    model: ModelSection = Field(description="architecture and sizes")
    data: DataSection = Field(default=DataSection(), description="dataset")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="optimiser")
    schedule: ScheduleSection = Field(default=ScheduleSection(), description="learning rate over the run")
    train: TrainSection = Field(default=TrainSection(), description="length, batch, numerics")
    parallel: ParallelSection = Field(default=ParallelSection(), description="division over ranks")
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), description="saving")
    run: RunSection = Field(default=RunSection(), description="run directory and start")
    logging: LoggingSection = Field(default=LoggingSection(), description="reports")

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """Reads a YAML file or a shipped preset.

        Args:
            path: a file, or a preset's name; a bare name that a preset has always means the preset.
            overrides: `section.field=value`, the value in YAML; the last one for a field wins.

        Raises:
            ConfigError: with every problem there is; at the first one if a file cannot be read at all.
        """
        files = read_layers(path)
        from_command_line, problems = read_overrides(cls, overrides)
        return build(cls, [*files, *from_command_line], files[-1].source, problems)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TrainConfig:
        """Checks a mapping of sections, as `load` checks a file; `extends` is not followed.

        Raises:
            ConfigError: with every problem there is.
        """
        return build(cls, [Layer("configuration", content)], "configuration")

    def to_yaml(self) -> str:
        """The resolved configuration, which `load` reads back equal."""
        return dump_yaml(self.model_dump(mode="json"))

    @property
    def layout(self) -> Literal["dense", "btp", "vanilla", "vanilla_sharded_heads"]:
        """How the blocks are split over the tp ranks: dense ones as in Megatron, low-rank ones as configured."""
        return "dense" if self.model.linear == "dense" else self.parallel.tensor_layout

    @property
    def stages(self) -> int:
        """Pipeline stages, over all pp ranks."""
        parallel = self.parallel
        return parallel.pp * STAGES_PER_RANK.get(parallel.pipeline_schedule, 1) if parallel.pp > 1 else 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in a step."""
        return self.train.global_batch_size // (self.parallel.dp * self.train.micro_batch_size)

    @model_validator(mode="after")
    def _resolve_and_check(self) -> TrainConfig:
        violations = [
            *_model_rules(self),
            *_tensor_parallel_rules(self),
            *_baseline_rules(self),
            *_bridge_rules(self),
            *_crossing_rules(self),
            *_zero_rules(self),
            *_training_rules(self),
            *_pipeline_rules(self),
            *_availability_rules(self),
        ]
        if violations:
            raise RulesBroken(violations)
        if "micro_batch_size" not in self.train.model_fields_set:
            micro = self.train.global_batch_size // self.parallel.dp
            object.__setattr__(self, "train", self.train.model_copy(update={"micro_batch_size": micro}))
        return self


def _model_rules(config: TrainConfig) -> Iterator[Violation]:
    model = config.model
    if model.heads % model.kv_heads:
        yield Violation(
            ("model.kv_heads", "model.heads"),
            "query heads cannot be shared out evenly",
            expected=f"a divisor of model.heads = {model.heads}",
            got=model.kv_heads,
            hint=f"nearest: {_near_divisors(model.heads, model.kv_heads)}",
        )
    if "head_size" in model.model_fields_set:
        if model.head_size % 2:
            yield Violation(
                ("model.head_size",),
                "RoPE rotates pairs",
                expected="an even number",
                got=model.head_size,
                hint=f"nearest: {_near_multiples(2, model.head_size)}",
            )
    elif model.hidden_size % (2 * model.heads):
        yield Violation(
            ("model.hidden_size", "model.heads", "model.head_size"),
            "does not give heads of an even size, as RoPE needs them",
            expected=f"a multiple of 2 x model.heads = {2 * model.heads}",
            got=model.hidden_size,
            hint=f"nearest: {_near_multiples(2 * model.heads, model.hidden_size)}; or set model.head_size",
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
                hint=f"nearest that suits: {_near_divisors(math.gcd(*whole.values()), tp)}",
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


def _crossing_rules(config: TrainConfig) -> Iterator[Violation]:
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
            hint=f"nearest: {_near_divisors(parallel.dp, parallel.dp_replicate)}",
        )
    if parallel.zero == 3 and parallel.overlap == "split_batch":
        yield Violation(
            ("parallel.zero", "parallel.overlap"),
            "split_batch runs two halves through all blocks at once, so their weights could not be freed in between",
            expected="0, 1 or 2",
            got=3,
        )


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
            hint=f"nearest: {_near_multiples(unit, train.global_batch_size)}",
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
        micro = (
            train.micro_batch_size if "micro_batch_size" in train.model_fields_set else train.global_batch_size // dp
        )
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
            "dropout masks are drawn by the host, which compiled code cannot do",
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
    if train.recompute == "latent" and config.model.linear == "dense":
        yield Violation(
            ("train.recompute", "model.linear"),
            "a dense model has no latents to keep",
            expected="none or block",
            got="latent",
        )
    yield from _loro_rules(config)
    yield from _factor_rules(config)
    if config.optimizer.exact_every is not None and config.optimizer.name != "loro":
        yield Violation(
            ("optimizer.exact_every", "optimizer.name"),
            f"only LORO has exact steps, and optimizer.name = {config.optimizer.name}",
            expected="null",
            got=config.optimizer.exact_every,
        )


def _loro_rules(config: TrainConfig) -> Iterator[Violation]:
    """LORO moves products B A of whole rank, and turns the bases of their factors."""
    model, optimizer = config.model, config.optimizer
    if config.schedule.name == "jagged_cosine" and optimizer.name != "loro":
        yield Violation(
            ("schedule.name", "optimizer.name"),
            "jagged_cosine warms up again after each exact step of LORO",
            expected="cosine, linear or constant, or optimizer.name = loro",
            got="jagged_cosine",
        )
    if config.schedule.name == "jagged_cosine" and config.train.steps < 2 * config.schedule.warmup_steps:
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


def _factor_rules(config: TrainConfig) -> Iterator[Violation]:
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
    if schedule in ZERO_BUBBLE and parallel.zero and parallel.dp > 1:
        yield Violation(
            ("parallel.zero", "parallel.pipeline_schedule", "parallel.pp"),
            f"{schedule} puts weight gradients off until after the backward pass, at whose end ZeRO reduces them",
            expected="0",
            got=parallel.zero,
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
    micro = train.micro_batch_size if "micro_batch_size" in train.model_fields_set else sequences
    if sequences < micro or sequences % micro:
        return  # _training_rules says so
    count = sequences // micro
    rounds = max(1, count // pp)
    fits = [size for size in range(1, sequences // pp + 1) if sequences % size == 0]
    fields = ("train.micro_batch_size", "train.global_batch_size", "parallel.dp", "parallel.pp")
    if schedule == "1f1b" and count < pp:
        yield Violation(
            (*fields, "parallel.pipeline_schedule"),
            f"1f1b needs as many micro-batches as stages; {sequences} sequences of a dp rank are {count} of {micro}",
            expected=f"at least {pp} micro-batches",
            got=count,
            hint=f"lower it to {fits[-1]}" if fits else "enlarge train.global_batch_size",
        )
    if schedule in ("interleaved_1f1b", "zero_bubble") and count % rounds:
        yield Violation(
            (*fields, "parallel.pipeline_schedule"),
            f"{schedule} takes the {count} micro-batches of a step in {count} // pp = {rounds} equal rounds",
            expected=f"a multiple of {rounds} micro-batches",
            got=count,
            hint=f"nearest: {_near_multiples(rounds, count)}",
        )


# Fields with values that are part of the schema but not of this version, and the values that are available.
NOT_AVAILABLE: Mapping[str, tuple[object, ...]] = {
    "model.linear": ("dense", "low_rank"),
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


def _near_multiples(of: int, number: int) -> str:
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)


def _near_divisors(of: int, number: int) -> str:
    """The divisors of `of` just below and just above a number that is not one."""
    small = [divisor for divisor in range(1, math.isqrt(of) + 1) if of % divisor == 0]
    divisors = {*small, *(of // divisor for divisor in small)}
    below = max(divisor for divisor in divisors if divisor <= number)
    above = [divisor for divisor in divisors if divisor > number]
    return f"{below} or {min(above)}" if above else str(below)
