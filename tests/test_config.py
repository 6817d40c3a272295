"""The configuration: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from boost.config import ConfigError, ModelSection, TrainConfig
from boost.config_rules import NOT_AVAILABLE
from boost.errors import UserError

MODEL = {"hidden_size": 64, "ffn_size": 100, "layers": 2, "heads": 4, "vocab_size": 101}
TEXT = "model: {hidden_size: 64, ffn_size: 100, layers: 2, heads: 4, vocab_size: 101}\n"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str | bytes, name: str = "my.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def config(**sections: dict[str, Any]) -> TrainConfig:
    return TrainConfig.from_dict({**sections, "model": {**MODEL, **sections.get("model", {})}})


def refusals(**sections: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    return caught.value.problems


def refusal(**sections: dict[str, Any]) -> str:
    (problem,) = refusals(**sections)
    return problem


def file_refusal(path: Path | str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(path, overrides)
    (problem,) = caught.value.problems
    assert "\n" not in problem
    assert caught.value.exit_code == 2
    return problem


# Defaults


@pytest.mark.parametrize(
    ("parallel", "train", "overlap"),
    [
        ({}, {}, "none"),
        ({"tp": 2}, {}, "weight_grads"),
        ({"tp": 2, "tensor_layout": "vanilla"}, {}, "weight_grads"),
        ({"tp": 2, "overlap": "none"}, {}, "none"),
        ({"tp": 2, "overlap": None}, {}, "weight_grads"),
        ({"tp": 2}, {"compile": True}, "none"),
        ({"tp": 2, "pp": 2, "pipeline_schedule": "zero_bubble"}, {}, "none"),
    ],
)
def test_weight_gradients_hide_all_reduces_unless_something_excludes_it(
    parallel: dict[str, Any], train: dict[str, Any], overlap: str
) -> None:
    resolved = config(parallel=parallel, train={"micro_batch_size": 1, **train})
    assert resolved.parallel.overlap == overlap
    assert TrainConfig.from_dict(resolved.model_dump()) == resolved


def test_defaults_are_filled_in() -> None:
    resolved = config()
    assert (resolved.model.kv_heads, resolved.model.head_size, resolved.model.rank) == (4, 16, 16)
    assert resolved.train.micro_batch_size == 8
    assert resolved.run.resume == "auto"
    assert resolved.layout == "btp"


def test_null_means_the_default_where_it_follows_from_other_fields() -> None:
    model = {"kv_heads": None, "head_size": None, "rank": None}
    assert config(model=model, train={"micro_batch_size": None}) == config()


def test_micro_batch_defaults_to_the_share_of_a_data_parallel_rank() -> None:
    assert config(parallel={"dp": 4}).train.micro_batch_size == 2


@pytest.mark.parametrize(("sequences", "pp", "size"), [(8, 2, 4), (8, 3, 2), (7, 2, 1), (12, 4, 3), (2**31 - 1, 2, 1)])
def test_micro_batch_defaults_to_what_1f1b_can_take(sequences: int, pp: int, size: int) -> None:
    train, model = {"global_batch_size": 2 * sequences if sequences < 100 else sequences}, {"layers": 4}
    dp = 2 if sequences < 100 else 1
    resolved = config(model=model, train=train, parallel={"pp": pp, "dp": dp})
    assert resolved.train.micro_batch_size == size
    gpipe = config(model=model, train=train, parallel={"pp": pp, "dp": dp, "pipeline_schedule": "gpipe"})
    assert gpipe.train.micro_batch_size == sequences


def test_a_dense_model_has_no_rank() -> None:
    dense = config(model={"linear": "dense"})
    assert dense.model.rank is None
    assert dense.layout == "dense"
    assert "model.rank: a dense model has no rank" in refusal(model={"linear": "dense", "rank": 16})
    assert "model.factor_init: is for the factors" in refusal(model={"linear": "dense", "factor_init": "xavier"})


def test_configurations_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().train.steps = 3


def test_sections_can_be_put_together_in_python() -> None:
    model = ModelSection(hidden_size=64, ffn_size=100, layers=2, heads=4, vocab_size=101)
    assert TrainConfig(model=model) == config()
    with pytest.raises(ValidationError, match="kv_heads"):
        TrainConfig(model=ModelSection(hidden_size=64, ffn_size=100, layers=2, heads=4, kv_heads=3, vocab_size=101))


def test_every_field_is_described_in_one_line() -> None:
    for section in TrainConfig.model_fields.values():
        assert isinstance(section.annotation, type) and issubclass(section.annotation, BaseModel)
        for name, field in section.annotation.model_fields.items():
            assert field.description and "\n" not in field.description, name


def test_importing_the_configuration_does_not_import_torch() -> None:
    code = "import sys, boost.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Types


@pytest.mark.parametrize("text", ["6e-3", "6E-3", "0.006", ".006", "6.e-3", "+6e-3", "600e-5"])
def test_floats_may_be_written_in_every_usual_way(write: Write, text: str) -> None:
    assert TrainConfig.load(write(TEXT + f"optimizer: {{lr: {text}}}")).optimizer.lr == pytest.approx(6e-3)
    assert TrainConfig.load(write(TEXT), [f"optimizer.lr={text}"]).optimizer.lr == pytest.approx(6e-3)


def test_whole_numbers_do_for_floats(write: Write) -> None:
    resolved = TrainConfig.load(write(TEXT), ["optimizer.lr=1", "optimizer.betas=[0, 0.9]", "train.steps=1_000"])
    assert (resolved.optimizer.lr, resolved.optimizer.betas, resolved.train.steps) == (1.0, (0.0, 0.9), 1000)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.layers='3'", "(expected a whole number >= 1, got '3'); write 3 without quotes"),
        ("model.layers=true", "(expected a whole number >= 1, got true)"),
        ("model.layers=3.0", "got 3.0); write 3"),
        ("model.layers=0", "got 0)"),
        ("model.layers=010", "got '010')"),
        ("model.layers=4000000000", "(expected a whole number >= 1 and <= 2147483647, got 4000000000)"),
        ("model.layers=" + "9" * 5000, "expected a whole number"),
        ("model.layers=", "got null)"),
        ("model.layers=[1, 2]", "got [1, 2])"),
        ("model.layers={a: 1}", "got {'a': 1})"),
        ("model.tie_embeddings=1", "(expected true or false, got 1)"),
        ("model.tie_embeddings='true'", "write true without quotes"),
        ("model.dropout=1", "(expected a finite number >= 0 and < 1, got 1)"),
        ("optimizer.lr='6e-3'", "write 6e-3 without quotes"),
        ("optimizer.lr=true", "(expected a finite number > 0, got true)"),
        ("optimizer.lr=0", "got 0)"),
        ("optimizer.lr=.nan", "got nan)"),
        ("optimizer.lr=.inf", "got inf)"),
        ("optimizer.lr=1e999", "got inf)"),
        ("optimizer.betas=0.9", "(expected a list of 2, each a finite number >= 0 and < 1, got 0.9)"),
        ("optimizer.betas=[0.9]", "got [0.9])"),
        ("optimizer.betas=[0.9, 1]", "got [0.9, 1])"),
        ("optimizer.betas=[0.9, true]", "got [0.9, true])"),
        ("optimizer.clip=0", "(expected a finite number > 0 or null, got 0)"),
        ("parallel.zero=true", "(expected a whole number >= 0 and <= 3, got true)"),
        ("schedule.min_lr_ratio=1.5", "(expected a finite number >= 0 and <= 1, got 1.5)"),
        ("run.dir=3", "(expected text, got 3); put it in quotes"),
        ("run.dir=''", "got '')"),
        ("train.precision=fp23", "(expected bf16, fp32 or fp64, got 'fp23'); did you mean fp32?"),
        ("train.precision=fp16", "did you mean bf16?"),
        ("model.crossing=", "got null); did you mean none?"),
        ("run.resume=true", "(expected auto or false, got true)"),
    ],
)
def test_wrong_values_are_refused(write: Write, override: str, says: str) -> None:
    problem = file_refusal(write(TEXT), override)
    assert problem.startswith(f"command line: {override.partition('=')[0]}: is not allowed (expected ")
    assert says.replace("[0.9, true]", "[0.9, True]") in problem
    assert len(problem) < 300


def test_resume_takes_the_yaml_value_false(write: Write) -> None:
    for text in ("false", "'false'", "no"):
        assert TrainConfig.load(write(TEXT), [f"run.resume={text}"]).run.resume == "false"


def test_text_that_yaml_would_call_a_date_or_a_time_stays_text(write: Write) -> None:
    for text in ("2026-01-31", "12:30:45"):
        assert TrainConfig.load(write(TEXT), [f"run.dir={text}"]).run.dir == text


def test_clipping_can_be_switched_off(write: Write) -> None:
    assert TrainConfig.load(write(TEXT), ["optimizer.clip=null"]).optimizer.clip is None


# Names


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.hiden_size=3", "command line: model.hiden_size: unknown field (expected linear, hidden_size,"),
        ("model.hiden_size=3", "did you mean model.hidden_size?"),
        ("modle.layers=3", "command line: modle: unknown section (expected model, data,"),
        ("modle.layers=3", "did you mean model?"),
        ("optimiser.lrr=3", "did you mean optimizer.lr?"),
        ("train.lr=3", "did you mean optimizer.lr?"),
        ("lr=3", "is not an override (expected section.field=value, got 'lr=3'); did you mean optimizer.lr?"),
        ("train.steps", "is not an override (expected section.field=value, got 'train.steps')"),
        ("train.steps=[1", "command line: train.steps: is not valid YAML"),
        ("train.steps.more=1", "unknown field"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(write: Write, override: str, says: str) -> None:
    assert says in file_refusal(write(TEXT), override)


def test_a_field_outside_any_section_is_sent_to_its_own(write: Write) -> None:
    path = write(TEXT + "lr: 3\n")
    assert file_refusal(path).startswith(f"{path}: lr: unknown section (expected model,")
    assert file_refusal(path).endswith("did you mean optimizer.lr?")


def test_a_misspelt_extends_is_the_only_problem(write: Write) -> None:
    path = write("extend: quickstart\nrun: {dir: runs/mine}\n")
    assert file_refusal(path) == f"{path}: extend: unknown section; did you mean extends?"


def test_a_section_must_be_a_mapping_and_may_be_empty(write: Write) -> None:
    assert "data: is not a section (expected a mapping of fields, got 3)" in file_refusal(write(TEXT + "data: 3"))
    assert TrainConfig.load(write(TEXT + "data:\n  # path: somewhere\n")) == config()


def test_the_last_override_of_a_field_wins(write: Write) -> None:
    assert TrainConfig.load(write(TEXT), ["train.steps=x", "train.steps=7"]).train.steps == 7


# All at once


def test_all_problems_are_reported_at_once(write: Write) -> None:
    path = write("model: {hidden_size: x, ffn_size: 9, heads: 6, kv_heads: 4, vocab_size: 7, lyers: 2}\nparalel: {}\n")
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(path, ["train.global_batch_size=9", "train.micro_batch_size=2", "logging.wandb=true", "oops"])
    problems = caught.value.problems
    starts = [
        "command line: is not an override",
        f"{path}: model.lyers: unknown field",
        f"{path}: paralel: unknown section",
        f"{path}: model.hidden_size: is not allowed",
        f"{path}: model.layers: is required and not set (expected a whole number >= 1)",
        f"{path}: model.kv_heads: query heads cannot be shared out evenly",
        "command line: train.global_batch_size: is not a whole number of micro-batches",
        "command line: logging.wandb: true is not available",
    ]
    assert [problem[: len(start)] for problem, start in zip(problems, starts, strict=True)] == starts
    assert str(caught.value) == " | ".join(problems)


def test_a_rule_is_not_applied_to_a_field_that_is_itself_wrong() -> None:
    (problem,) = refusals(model={"heads": "six"}, parallel={"tp": 8})
    assert "model.heads" in problem


def test_the_error_is_a_user_error_and_survives_pickling() -> None:
    error = ConfigError(["a: b", "c: d"])
    assert isinstance(error, UserError)
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


def test_a_missing_model_section_names_the_file_and_the_fields(write: Write) -> None:
    path = write("train: {steps: 3}")
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(path)
    assert [problem.split(": ")[:2] for problem in caught.value.problems] == [
        [str(path), f"model.{field}"] for field in ("hidden_size", "ffn_size", "layers", "heads", "vocab_size")
    ]


# Rules over several fields


def test_kv_heads_divide_heads() -> None:
    assert config(model={"heads": 8, "head_size": 8, "kv_heads": 2}).model.kv_heads == 2
    problem = refusal(model={"heads": 6, "head_size": 8, "kv_heads": 4})
    assert "model.kv_heads: " in problem
    assert "(expected a divisor of model.heads = 6, got 4); nearest: 3 or 6" in problem


def test_heads_have_an_even_size() -> None:
    problem = refusal(model={"hidden_size": 62, "heads": 4})
    assert "(expected a multiple of 2 x model.heads = 8, got 62); nearest: 56 or 64; or set model.head_size" in problem
    assert "model.hidden_size: " in refusal(model={"hidden_size": 60, "heads": 4})  # 15 each
    assert "(expected an even number, got 15); nearest: 14 or 16" in refusal(model={"head_size": 15})
    assert config(model={"hidden_size": 62, "head_size": 16}).model.head_size == 16


def test_a_default_rank_of_zero_is_refused() -> None:
    assert "model.hidden_size // 4, is 0" in refusal(model={"hidden_size": 2, "heads": 1})


@pytest.mark.parametrize(("linear", "layout"), [("dense", "dense"), ("low_rank", "btp")])
def test_tp_divides_the_heads(linear: str, layout: str) -> None:
    problem = refusal(model={"linear": linear, "heads": 6, "hidden_size": 96}, parallel={"tp": 4})
    assert f"the {layout} layout splits model.heads = 6 over tp ranks (expected a divisor of 6, got 4)" in problem


def test_tp_divides_what_each_layout_splits() -> None:
    model = {"heads": 6, "kv_heads": 3, "hidden_size": 62, "head_size": 8}
    heads, kv_heads = refusals(model=model, parallel={"tp": 4, "tensor_layout": "vanilla_sharded_heads"})
    assert "parallel.tp: the vanilla_sharded_heads layout splits model.heads = 6" in heads
    assert "splits model.kv_heads = 3" in kv_heads
    assert kv_heads.endswith("nearest that suits: 3")
    assert config(model=model, parallel={"tp": 4, "tensor_layout": "vanilla"}).layout == "vanilla"
    assert config(model=model, parallel={"tp": 3, "tensor_layout": "vanilla_sharded_heads"}).parallel.tp == 3
    assert "splits model.hidden_size = 62" in refusal(model=model, parallel={"tp": 3})


def test_mlp_vocabulary_and_rank_need_not_be_divisible() -> None:
    assert config(model={"ffn_size": 5461, "vocab_size": 32001, "rank": 7}, parallel={"tp": 4}).parallel.tp == 4


def test_the_global_batch_is_made_of_micro_batches() -> None:
    problem = refusal(train={"global_batch_size": 24, "micro_batch_size": 8}, parallel={"dp": 2})
    assert "= 2 x 8 = 16, got 24); nearest: 16 or 32" in problem
    problem = refusal(train={"global_batch_size": 9}, parallel={"dp": 2})
    assert "(expected a multiple of parallel.dp = 2, got 9); nearest: 8 or 10" in problem
    assert "nearest: 3" in refusal(train={"global_batch_size": 1}, parallel={"dp": 3})


def test_a_run_may_end_within_its_warm_up() -> None:
    """Shortening a preset with `train.steps` alone works."""
    assert config(train={"steps": 10}, schedule={"warmup_steps": 11}).train.steps == 10


def test_dense_models_have_one_layout() -> None:
    dense = {"linear": "dense"}
    assert config(model=dense, parallel={"tensor_layout": "btp", "norm": "sync"}).layout == "dense"
    problem = refusal(model=dense, parallel={"tensor_layout": "vanilla"})
    assert "parallel.tensor_layout: " in problem and "leave it out" in problem


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"model": {"linear": "dense"}}, "low_rank linears"),
        ({"parallel": {"tensor_layout": "vanilla"}}, "vanilla layouts split them"),
        ({"parallel": {"sequence_sharded_bottleneck": True}}, "alone in sequence_sharded_bottleneck"),
        ({"parallel": {"overlap": "split_batch"}}, "split_batch hands on the residual stream alone"),
        ({"train": {"compile": True}}, "what train.compile compiles"),
    ],
)
def test_what_crossings_do_not_go_with(sections: dict[str, Any], reason: str) -> None:
    problem = refusal(**{**sections, "model": {"crossing": "tensor", **sections.get("model", {})}})
    assert "model.crossing: " in problem and reason in problem and "(expected none, got tensor)" in problem
    for kept in ("weight_grads", "none"):
        assert config(model={"crossing": "dense"}, parallel={"overlap": kept}).model.crossing == "dense"


BLOCKS = {"sparse_support": "block_diagonal"}


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"parallel": {"tensor_layout": "vanilla"}}, "(expected btp, got vanilla)"),
        ({"parallel": {"bridge_dtype": "fp32"}}, "(expected compute, got fp32)"),
        ({"parallel": {"sequence_sharded_bottleneck": True}}, "(expected false, got true)"),
        ({"parallel": {"overlap": "split_batch"}}, "(expected none or weight_grads, got split_batch)"),
        ({"train": {"compile": True}}, "(expected false, got true)"),
        ({"train": {"recompute": "latent"}}, "(expected none or block, got latent)"),
        ({"model": {"crossing": "dense"}}, "is for the bottlenecks of low_rank linears"),
        ({"optimizer": {"name": "muon"}}, "muon is for the factors of low-rank linears"),
        ({"optimizer": {"name": "loro", "exact_every": 5}}, "(expected model.linear = low_rank"),
        ({"model": {"sparse_density": 1e-4}}, "gives the smallest linear, of 4096 entries, none"),
        ({"model": {**BLOCKS, "ffn_size": 44}}, "does not divide model.ffn_size = 44 into equal blocks"),
        ({"model": {**BLOCKS, "sparse_blocks": 2}, "parallel": {"tp": 4}}, "(expected a multiple of 4, got 2)"),
        ({"model": {**BLOCKS, "ffn_size": 96, "sparse_density": 0.2}}, "(expected at most 0.125, got 0.2)"),
    ],
)
def test_what_sltrain_does_not_go_with(sections: dict[str, Any], reason: str) -> None:
    problem = refusal(**{**sections, "model": {"linear": "sltrain", **sections.get("model", {})}})
    assert reason in problem, problem
    for support in ("uniform", "block_diagonal"):
        model = {"linear": "sltrain", "sparse_support": support, "ffn_size": 64}
        assert config(model=model, parallel={"tp": 2, "dp": 2, "zero": 3}, train={"recompute": "block"})


def test_exact_steps_are_for_loro_only() -> None:
    assert "only LORO has exact steps" in refusal(optimizer={"exact_every": 500})


LORO = {"name": "loro", "exact_every": 500}
SVD = {"bottleneck_activation": "none"}


def test_loro_goes_with_svd_under_btp_at_every_zero_stage() -> None:
    for zero in (0, 1, 2, 3):
        assert config(optimizer=LORO, model=SVD, parallel={"tp": 2, "dp": 2, "zero": zero}).optimizer.name == "loro"
    assert config(optimizer=LORO, model=SVD, parallel={"tensor_layout": "vanilla"}).layout == "vanilla"


@pytest.mark.parametrize(
    ("field", "reason", "sections"),
    [
        ("optimizer.exact_every", "the number of steps between two exact ones", {"optimizer": {"name": "loro"}}),
        ("optimizer.name", "turns the bases of bottlenecks", {"model": {}}),
        ("optimizer.name", "turns the bases of bottlenecks", {"model": {"linear": "dense"}}),
        ("model.rank", "no factor of model.hidden_size", {"model": {**SVD, "rank": 65}}),
        (
            "model.rank",
            "no factor of model.kv_heads x model.head_size = 16",
            {"model": {**SVD, "kv_heads": 1, "rank": 17}},
        ),
        (
            "optimizer.name",
            "the rank of a factor whole on every rank",
            {"parallel": {"tp": 2, "tensor_layout": "vanilla"}},
        ),
        (
            "schedule.warmup_steps",
            "longer than the run",
            {"schedule": {"name": "jagged_cosine", "warmup_steps": 6}, "train": {"steps": 11}},
        ),
    ],
)
def test_what_loro_does_not_go_with(field: str, reason: str, sections: dict[str, Any]) -> None:
    problem = refusal(**{"optimizer": LORO, "model": SVD, **sections})
    assert field in problem and reason in problem


def test_muon_is_for_whole_factors() -> None:
    muon = {"name": "muon"}
    assert config(optimizer=muon, parallel={"tp": 2, "dp": 2, "zero": 3}).optimizer.name == "muon"
    assert "factors of low-rank linears" in refusal(optimizer=muon, model={"linear": "dense"})
    problem = refusal(optimizer=muon, parallel={"tp": 2, "tensor_layout": "vanilla_sharded_heads"})
    assert "muon needs the rank of a factor whole on every rank" in problem


def test_the_jagged_cosine_is_for_loro_only() -> None:
    assert "every exact step of LORO, or every restart of ReLoRA" in refusal(schedule={"name": "jagged_cosine"})


RELORA: dict[str, Any] = {
    "model": {"linear": "relora"},
    "optimizer": {"restart_every": 200},
    "schedule": {"name": "jagged_cosine"},
}


def test_relora_goes_with_every_zero_stage_and_schedule_of_a_pipeline() -> None:
    for zero in (0, 1, 2, 3):
        found = config(**RELORA, parallel={"tp": 2, "dp": 2, "zero": zero, "overlap": "weight_grads"})
        assert found.layout == "dense" and found.model.rank == 16
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        config(**RELORA, parallel={"pp": 2, "pipeline_schedule": schedule}, train={"micro_batch_size": 1})
    for schedule in ("cosine", "constant"):
        assert config(model={"linear": "relora"}, schedule={"name": schedule}).optimizer.restart_every is None


@pytest.mark.parametrize(
    ("field", "reason", "sections"),
    [
        ("parallel.tensor_layout", "frozen matrices are wide", {"parallel": {"tensor_layout": "vanilla"}}),
        ("parallel.sequence_parallel", "for dense models", {"parallel": {"sequence_parallel": True}}),
        ("parallel.overlap", "the bridges of BTP", {"parallel": {"overlap": "split_batch"}}),
        ("train.recompute", "a relora model has no chunks between latents", {"train": {"recompute": "latent"}}),
        ("train.compile", "for dense and low_rank blocks", {"train": {"compile": True}}),
        ("model.crossing", "low_rank linears", {"model": {"linear": "relora", "crossing": "diagonal"}}),
        ("optimizer.name", "factors of low-rank linears", {"optimizer": {"restart_every": 200, "name": "muon"}}),
        (
            "optimizer.name",
            "bases of bottlenecks",
            {"optimizer": {"restart_every": 200, "name": "loro", "exact_every": 200}},
        ),
        ("optimizer.restart_every", "both or neither, got null and jagged_cosine", {"optimizer": {}}),
        ("optimizer.restart_every", "both or neither, got 200 and cosine", {"schedule": {"name": "cosine"}}),
        ("train.steps", "a multiple of optimizer.restart_every = 200, got 900", {"train": {"steps": 900}}),
        (
            "schedule.warmup_steps",
            "at most optimizer.restart_every = 200",
            {"schedule": {"name": "jagged_cosine", "warmup_steps": 201}},
        ),
        (
            "schedule.restart_warmup_steps",
            "at least 1 and less than",
            {"schedule": {"name": "jagged_cosine", "restart_warmup_steps": 0}},
        ),
        (
            "schedule.restart_warmup_steps",
            "less than optimizer.restart_every = 100",
            {"optimizer": {"restart_every": 100}},
        ),
        ("optimizer.restart_every", "only ReLoRA merges", {"model": {}, "schedule": {}}),
        ("model.lora_dropout", "is for relora", {"model": {"lora_dropout": 0.1}, "optimizer": {}, "schedule": {}}),
    ],
)
def test_what_relora_does_not_go_with(field: str, reason: str, sections: dict[str, Any]) -> None:
    problem = refusal(**{**RELORA, **sections})
    assert field in problem and reason in problem


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logging.wandb", True),
        ("logging.trackio", True),
    ],
)
def test_what_is_not_available_says_what_is(field: str, value: object) -> None:
    section, _, name = field.partition(".")
    problem = refusal(**{section: {name: value}})
    available = ", ".join(str(choice).lower() for choice in NOT_AVAILABLE[field])
    assert problem.endswith(f"{field}: {str(value).lower()} is not available in this version (available: {available})")


@pytest.mark.parametrize(
    "parallel",
    [
        {"bridge_dtype": "int8", "tensor_layout": "vanilla"},
        {"bridge_dtype": "fp32", "overlap": "split_batch"},
        {"bridge_dtype": "fp8", "sequence_sharded_bottleneck": True},
        {"sequence_sharded_bottleneck": True, "tensor_layout": "vanilla_sharded_heads"},
        {"sequence_sharded_bottleneck": True, "overlap": "split_batch"},
        {"sequence_sharded_bottleneck": True, "norm": "sync"},
    ],
    ids=str,
)
def test_bridges_that_do_not_go_together(parallel: dict[str, Any]) -> None:
    assert f"parallel.{next(iter(parallel))}" in refusal(parallel=parallel)


@pytest.mark.parametrize(
    "other",
    [
        {"parallel": {"overlap": "weight_grads"}},
        {"model": {"dropout": 0.1}},
        {"parallel": {"sequence_sharded_bottleneck": True}},
        {"model": {"linear": "dense", "rank": None}, "parallel": {"sequence_parallel": True}},
    ],
    ids=str,
)
def test_what_cannot_be_compiled(other: dict[str, Any]) -> None:
    assert "train.compile" in refusal(train={"compile": True}, **other)


@pytest.mark.parametrize("option", [{"bridge_dtype": "int8"}, {"sequence_sharded_bottleneck": True}], ids=str)
def test_other_bridges_need_low_rank_linears(option: dict[str, Any]) -> None:
    assert f"parallel.{next(iter(option))}" in refusal(model={"linear": "dense", "rank": None}, parallel=option)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ({}, {"sequence_parallel": True}),
        ({}, {"sequence_parallel": True, "tensor_layout": "vanilla"}),
        ({"linear": "dense", "rank": None, "dropout": 0.1}, {"sequence_parallel": True}),
        ({}, {"group_b": False}),
        ({"linear": "dense", "rank": None}, {"group_b": False}),
    ],
    ids=str,
)
def test_options_of_one_baseline(model: dict[str, Any], parallel: dict[str, Any]) -> None:
    assert f"parallel.{next(iter(parallel))}" in refusal(model=model, parallel=parallel)


def test_replicas_of_what_zero_shards() -> None:
    """They need something sharded, and equal groups."""
    assert "parallel.dp_replicate: says how often what ZeRO shards" in refusal(parallel={"dp": 4, "dp_replicate": 2})
    alone = refusal(parallel={"dp": 4, "zero": 3, "dp_replicate": 4})
    assert "parallel.dp_replicate: leaves one rank in each group" in alone
    assert "(expected a divisor of parallel.dp = 4 below it, got 4)" in alone
    problem = refusal(parallel={"dp": 4, "zero": 1, "dp_replicate": 3})
    assert "parallel.dp_replicate" in problem
    assert "a divisor of parallel.dp = 4, got 3); nearest: 2 or 4" in problem


def test_latents_of_a_dense_model() -> None:
    problem = refusal(model={"linear": "dense"}, train={"recompute": "latent"})
    assert "train.recompute: a dense model has no chunks between latents to repeat" in problem
    assert "(expected none or block, got latent)" in problem


def test_split_batch_of_one_sequence() -> None:
    for train in ({"global_batch_size": 8, "micro_batch_size": 1}, {"global_batch_size": 2}):
        problem = refusal(parallel={"dp": 2, "tp": 2, "overlap": "split_batch"}, train=train)
        assert "parallel.overlap: one sequence has no two halves" in problem
        assert "(expected train.micro_batch_size of at least 2, got 1)" in problem


def test_split_batch_keeps_weights_gathered() -> None:
    problem = refusal(parallel={"dp": 2, "tp": 2, "zero": 3, "overlap": "split_batch"})
    assert "parallel.zero" in problem
    assert "(expected 0, 1 or 2, got 3)" in problem


@pytest.mark.parametrize(
    ("parallel", "train", "says"),
    [
        (
            {"pp": 4, "pipeline_schedule": "zbv"},
            {},
            "parallel.pp: zbv cuts model.layers = 4 into pp x 2 = 8 stages, none empty (expected at most 2, got 4)",
        ),
        (
            {"pp": 4, "dp": 2},
            {"global_batch_size": 18, "micro_batch_size": 3},
            "train.micro_batch_size: with parallel.pp = 4, 1f1b needs 4 or more micro-batches of the 9 sequences of a "
            "dp rank (expected at most 1, got 3); set train.micro_batch_size=1",
        ),
        ({"pp": 2}, {"global_batch_size": 1}, "at least 2, got 1); set train.global_batch_size=2"),
        ({"pp": 2, "dp": 2}, {"global_batch_size": 1}, "is not a whole number of micro-batches on every data-parallel"),
        (
            {"pp": 2, "pipeline_schedule": "interleaved_1f1b"},
            {"global_batch_size": 10, "micro_batch_size": 2},
            "takes the 5 micro-batches of a step in 5 // pp = 2 equal rounds "
            "(expected a multiple of 2 micro-batches, got 5); nearest: 4 or 6",
        ),
        (
            {"pp": 2, "pipeline_schedule": "zero_bubble", "overlap": "weight_grads"},
            {},
            "weight gradients fill the bubb",
        ),
        ({"pp": 2, "pipeline_schedule": "zbv"}, {"recompute": "latent"}, "so nothing would be saved"),
        (
            {"pp": 2, "dp": 2, "pipeline_schedule": "zero_bubble", "zero": 3},
            {},
            "they need weights that stage 3 has freed by then (expected 0, 1 or 2, got 3)",
        ),
        (
            {"pp": 2, "dp": 4, "pipeline_schedule": "zbv", "zero": 2, "dp_replicate": 2},
            {"global_batch_size": 16},
            "zbv may have nothing left to reduce in the step's last pass, where replicas would be summed",
        ),
        (
            {"pp": 2, "pipeline_schedule": "zbv"},
            {"compile": True},
            "zbv puts weight gradients off, which compiled code",
        ),
    ],
)
def test_pipelines_that_cannot_be(parallel: dict[str, Any], train: dict[str, Any], says: str) -> None:
    train = {"global_batch_size": 8, "micro_batch_size": 1, **train}
    if train["global_batch_size"] == 1:
        del train["micro_batch_size"]
    assert says in refusal(model={"layers": 4}, parallel=parallel, train=train)


def test_stages_and_micro_batches_follow_from_the_fields() -> None:
    found = config(
        model={"layers": 8},
        parallel={"pp": 3, "dp": 2, "pipeline_schedule": "interleaved_1f1b"},
        train={"global_batch_size": 24, "micro_batch_size": 2},
    )
    assert (found.stages, found.micro_batches) == (6, 6)
    assert (config().stages, config().micro_batches) == (1, 1), "a schedule without a pipeline has no effect"


# Files


def test_extends_overrides_field_by_field_over_several_levels(write: Write) -> None:
    write(TEXT + "train: {steps: 1, seed: 1, sequence_length: 16}", "base/base.yaml")
    write("extends: base/base.yaml\ntrain: {steps: 2, seed: 2}", "middle.yaml")
    resolved = TrainConfig.load(write("extends: middle.yaml\ntrain: {steps: 3}"), ["train.global_batch_size=4"])
    assert (resolved.train.steps, resolved.train.seed, resolved.train.sequence_length) == (3, 2, 16)
    assert resolved.train.global_batch_size == 4


def test_extends_takes_a_preset(write: Write) -> None:
    path = write("extends: quickstart\ntrain: {steps: 60}")
    assert TrainConfig.load(path).model == TrainConfig.load("quickstart").model


def test_each_problem_names_the_file_that_set_the_value(write: Write) -> None:
    base = write(TEXT + "train: {steps: x}\noptimizer: {lr: x}\nschedule: {warmup_steps: 900}", "base.yaml")
    path = write("extends: base.yaml\noptimizer: {lr: 1e-3, eps: x}\nlogging: {evry: 1}")
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(path, ["data.seed=x"])
    starts = [f"{path}: logging.evry:", f"{path}: optimizer.eps:", f"{base}: train.steps:", "command line: data.seed:"]
    for start in starts:
        assert sum(problem.startswith(start) for problem in caught.value.problems) == 1
    assert len(caught.value.problems) == len(starts)


def test_a_rule_names_the_file_that_set_the_blamed_value(write: Write) -> None:
    write(TEXT + "optimizer: {exact_every: 900}", "base.yaml")
    problem = file_refusal(write("extends: base.yaml\noptimizer: {name: adamw}"))
    assert problem.startswith(str(write("", "base.yaml")) + ": optimizer.exact_every: ")
    # tp is at fault here, and a default is not: the first field that was set gives the name.
    assert file_refusal(write(TEXT), "train.global_batch_size=9", "parallel.dp=2").startswith("command line: train.glo")


def test_circles_are_refused(write: Write) -> None:
    path = write("extends: b.yaml", "a.yaml")
    write("extends: a.yaml", "b.yaml")
    problem = file_refusal(path)
    assert "extends: goes round in a circle" in problem
    assert "a.yaml -> " in problem
    assert "circle" in file_refusal(write("extends: self.yaml", "self.yaml"))


def test_a_missing_file_suggests_its_neighbour(write: Write, tmp_path: Path) -> None:
    write(TEXT, "small.yaml")
    problem = file_refusal(tmp_path / "smal.yaml")
    assert problem == f"{tmp_path}/smal.yaml: no such file; did you mean {tmp_path}/small.yaml?"
    assert "quickstart, without .yaml" in file_refusal("quickstart.yaml")
    path = write("extends: gone.yaml")
    assert file_refusal(path) == f"{path}: extends: {tmp_path}/gone.yaml: no such file"
    assert "no such file" in file_refusal("a/\0.yaml")
    assert "no such file" in file_refusal("a/" + "b" * 5000 + ".yaml")


def test_an_unknown_preset_suggests_the_nearest(write: Write) -> None:
    problem = file_refusal("quikstart")
    assert problem == "quikstart: is neither a file nor a shipped preset; did you mean quickstart?"
    assert "presets are bench-1024, boost-13b, " in file_refusal("xyz")
    assert "extends: cola-7: is neither a file" in file_refusal(write("extends: cola-7"))


def test_what_is_no_file_is_refused(write: Write, tmp_path: Path) -> None:
    assert "is a directory (expected a YAML file)" in file_refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "is not a regular file" in file_refusal(tmp_path / "pipe.yaml")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(write: Write) -> None:
    path = write(TEXT)
    path.chmod(0)
    assert "cannot be read: Permission denied" in file_refusal(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a configuration (expected a mapping of sections, got an empty file)"),
        ("- 1\n- 2\n", "is not a configuration (expected a mapping of sections, got [1, 2])"),
        ("model: {a: 1\n", ":2:1: is not valid YAML: "),
        ("model:\n\tlayers: 3\n", ":2:1: is not valid YAML: found character '\\t'"),
        ("model:\n\tlayers: 3\n", "indent with spaces, not tabs"),
        (
            "train:\n  steps: 1\n  seed: 2\n  steps: 3\n",
            ":4:3: is not valid YAML: key 'steps' is given twice, first on line 2",
        ),
        ("train: {}\ntrain: {}\n", ":2:1: is not valid YAML: key 'train' is given twice, first on line 1"),
        ("a: 1\n---\nb: 2\n", ":2:1: is not valid YAML: "),
        ("? [a, b]\n: 1\n", ":1:3: is not valid YAML: a key must be a plain word"),
        ("a: &x [1]\nb: *x\n", ":2:4: YAML aliases are not supported"),
        ("a: !!python/object/apply:os.system [ls]\n", ":1:4: YAML tags are not supported"),
        ("a: !!int x\n", "YAML tags are not supported"),
        ("a: 1\nb: \x07\n", ":2:4: is not valid YAML: character '\\x07' is not allowed"),
        ("extends: [a, b]\n", "extends: is not a name (expected one file or preset name, got ['a', 'b'])"),
        (b"train: {steps: 1}\nrun: {dir: \xff\xfe}\n", ":2: is not UTF-8 text at byte 29"),
        ("a: {b: 1}\n".encode("utf-16"), "is not UTF-8 text at byte 0"),
        ("a: " + "[" * 100_000, "is nested too deeply (expected at most 16 levels)"),
        ("a: " + "{x: " * 100_000, "is nested too deeply"),
        ("".join("  " * i + "a:\n" for i in range(600)), "is nested too deeply"),
        ("a: [" + "1, " * 100_000 + "]", "has too many entries"),
        ("#" * 1_000_001, "is too large for a configuration (expected at most 1000000 bytes)"),
    ],
)
@pytest.mark.timeout(20)
def test_bad_yaml_is_refused_in_one_line(write: Write, text: str | bytes, says: str) -> None:
    path = write(text)
    problem = file_refusal(path)
    assert problem.startswith(f"{path}:")
    assert says in problem
    assert len(problem) - len(str(path)) < 200


def test_a_byte_order_mark_is_accepted(write: Write) -> None:
    assert TrainConfig.load(write(b"\xef\xbb\xbf" + TEXT.encode())) == config()


def test_keys_that_are_no_names_are_unknown(write: Write) -> None:
    assert ": 1: unknown section" in file_refusal(write(TEXT + "1: {a: 1}"))
    assert "train.null: unknown field" in file_refusal(write(TEXT + "train: {null: 1}"))
    assert "<<: unknown section" in file_refusal(write(TEXT + "<<: {a: 1}"))


# Writing


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"linear": "dense"}, "parallel": {"dp": 2}},
        {"model": {"linear": "relora", "lora_dropout": 0.1}, "parallel": {"tp": 2}},
        {"optimizer": {"lr": 1e-05, "clip": None, "betas": [0.5, 0.1 + 0.2]}, "run": {"resume": False}},
        {"data": {"path": "6e-3"}, "run": {"dir": "010", "init_from": "no"}},
        {"data": {"path": "null"}, "run": {"dir": "a: b # 'c' \"d\"\n\t\u00e9\u2028", "init_from": "2026-01-31"}},
        {"run": {"dir": " ".join(["word"] * 100)}},
    ],
)
def test_what_is_written_is_read_back_equal(write: Write, sections: dict[str, Any]) -> None:
    written = config(**sections)
    assert TrainConfig.load(write(written.to_yaml())) == written
    assert TrainConfig.from_dict(written.model_dump()) == written


def test_from_dict_leaves_its_argument_alone() -> None:
    content: dict[str, Any] = {"model": dict(MODEL), "train": {"micro_batch_size": None}}
    before = copy.deepcopy(content)
    TrainConfig.from_dict(content)
    assert content == before


def test_from_dict_refuses_hostile_values_in_one_line() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert len(refusal(train={"steps": endless})) < 200
    assert len(refusal(train={"steps": "x" * 10**6})) < 200
