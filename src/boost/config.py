"""The configuration: one class per section, and how it is loaded and written. The rules between
fields are in `config_rules.py`.

A configuration is a YAML file with the sections below, `extends: other.yaml` (or a preset's name) for what it
shares with another one, and `section.field=value` overrides from the command line. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from boost.config_loader import (
    COUNT_MAX,
    ConfigError,
    Layer,
    build,
    dump_yaml,
    preset_names,
    read_layers,
    read_overrides,
)
from boost.config_rules import STAGES_PER_RANK, micro_batch_size, violations_of
from boost.config_violations import RulesBroken

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
    lora_alpha: Positive = Field(
        default=32.0, description="sltrain and relora: B A counts alpha / rank times; no effect elsewhere"
    )
    sparse_density: float = Field(
        default=0.03, gt=0, le=1, description="sltrain: share of entries that the sparse part of a linear has"
    )
    sparse_support: Literal["uniform", "block_diagonal"] = Field(
        default="uniform",
        description="sltrain: entries anywhere, as published, or in blocks on the diagonal, which need no gather",
    )
    sparse_blocks: Size = Field(
        default=8, description="sltrain: blocks of a block_diagonal support, part of the model; tp must divide it"
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
    lora_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="relora: probability with which A's input is dropped; published: 0.1"
    )
    attention_bias: bool = Field(default=False, description="biases on q, k, v and o")
    mlp_bias: bool = Field(default=False, description="biases on gate, up and down")
    init_std: Positive = Field(
        default=0.02, description="standard deviation of the initial embedding, head and dense linears; default: LLaMA"
    )
    factor_init: Literal["cola", "xavier"] = Field(
        default="cola", description="standard deviations of the initial factors: CoLA's or LORO's; only for low_rank"
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
    restart_every: Size | None = Field(
        default=None, description="relora: steps between merges, each with new factors and moments; null = never"
    )


class ScheduleSection(_Section):
    """The learning rate over the run, as a factor of `optimizer.lr`."""

    name: Literal["cosine", "linear", "constant", "jagged_cosine"] = Field(
        default="cosine", description="shape after the warm-up"
    )
    warmup_steps: Count = Field(default=0, description="steps of linear warm-up from 0; a shorter run ends within it")
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="last learning rate / peak; default: CoLA")
    restart_warmup_steps: Count = Field(
        default=100, description="relora's jagged_cosine: steps of linear warm-up from 0 after each restart"
    )


class TrainSection(_Section):
    """Length, batch and numerics of the run."""

    derived = frozenset({"micro_batch_size"})

    steps: Count = Field(default=1000, description="optimiser steps")
    sequence_length: Size = Field(default=256, description="tokens per sequence; default: the C4/LLaMA lineage")
    global_batch_size: Size = Field(default=8, description="sequences per optimiser step, over all ranks")
    micro_batch_size: Size = Field(
        default_factory=lambda data: data["global_batch_size"],  # TrainConfig divides it
        description="sequences per forward pass of one data-parallel rank; default: global_batch_size / dp, "
        "under 1f1b divided once more to give every stage one",
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

    derived = frozenset({"overlap"})

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
        default="btp",
        description="how low-rank linears are split over tp; for dense and relora (always Megatron) leave it out",
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
        default_factory=lambda data: "none",  # TrainConfig makes it weight_grads where that can be
        description="what hides the collectives: weight gradients, or the other half of the micro-batch; "
        "default: weight_grads with tp > 1 where nothing excludes it, else none",
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
    def from_dict(cls, content: Mapping[str, Any], source: str = "configuration") -> TrainConfig:
        """Checks a mapping of sections, as `load` checks a file; `extends` is not followed.

        Args:
            source: what to name where something is wrong.

        Raises:
            ConfigError: with every problem there is.
        """
        return build(cls, [Layer(source, content)], source)

    def to_yaml(self) -> str:
        """The resolved configuration, which `load` reads back equal."""
        return dump_yaml(self.model_dump(mode="json"))

    @property
    def layout(self) -> Literal["dense", "btp", "vanilla", "vanilla_sharded_heads"]:
        """How the blocks are split over the tp ranks: wide ones as in Megatron, low-rank ones as configured."""
        return "dense" if self.model.linear in ("dense", "relora") else self.parallel.tensor_layout

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
        violations = violations_of(self)
        if violations:
            raise RulesBroken(violations)
        if "micro_batch_size" not in self.train.model_fields_set:
            micro = micro_batch_size(self)
            object.__setattr__(self, "train", self.train.model_copy(update={"micro_batch_size": micro}))
        if self.parallel.tp > 1 and "overlap" not in self.parallel.model_fields_set:
            parallel = self.parallel.model_copy(update={"overlap": "weight_grads"})
            if not violations_of(self.model_copy(update={"parallel": parallel})):
                object.__setattr__(self, "parallel", parallel)
        return self
