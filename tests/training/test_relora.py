"""ReLoRA runs: resuming around a merge, in one layout and across layouts, and starting from a dense run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import boost
from boost.checkpoint.store import open_checkpoint
from boost.config import TrainConfig
from boost.errors import UserError
from tests.training.conftest import with_changes
from tests.training.runs import metrics, run, state_hash

pytestmark = pytest.mark.slow

Settings = dict[str, Any]
MERGED_AFTER = 4
RELORA: dict[str, Any] = {
    "model__linear": "relora",
    "model__lora_dropout": 0.1,
    "model__ffn_size": 43,
    "model__tie_embeddings": True,
    "optimizer__restart_every": 3,
    "schedule__name": "jagged_cosine",
    "schedule__restart_warmup_steps": 1,
    "checkpoint__every": 1,
    "checkpoint__keep": 0,
}


def relora(settings: Settings, directory: Path, **changes: Any) -> TrainConfig:
    """Six steps with a restart after the fourth."""
    return with_changes(settings, **{**RELORA, "run__dir": str(directory), **changes})


def cut(whole: TrainConfig, directory: Path, step: int) -> None:
    """A copy of a run that ended after that step."""
    shutil.copytree(whole.run.dir, directory)
    for path in (directory / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def test_a_run_goes_on_around_a_merge(settings: Settings, tmp_path: Path) -> None:
    """Before, right after and a step after it: the same state, bit for bit. Frozen matrices have no moments."""
    whole = relora(settings, tmp_path / "whole")
    run(whole)
    for step in (MERGED_AFTER - 1, MERGED_AFTER, MERGED_AFTER + 1):
        cut(whole, tmp_path / str(step), step)
        again = relora(settings, tmp_path / str(step))
        run(again)
        assert state_hash(again) == state_hash(whole)
    checkpoint = open_checkpoint(tmp_path / "whole" / "checkpoints" / f"step-{MERGED_AFTER}")
    assert checkpoint.state["optimizer_steps"] == MERGED_AFTER, "that of gains and tables, not that of factors"
    kinds = [kind for kind, name in checkpoint.tensors if name == "blocks.0.mlp.up.weight"]
    assert kinds == ["parameter"]
    assert not checkpoint.tensor("blocks.0.mlp.up.up.weight").any()
    assert not checkpoint.tensor("blocks.0.mlp.up.down.weight", "exp_avg_sq").any()
    assert checkpoint.tensor("embedding.weight", "exp_avg_sq").any()
    for other in (MERGED_AFTER - 1, MERGED_AFTER + 1):
        beside = open_checkpoint(tmp_path / "whole" / "checkpoints" / f"step-{other}")
        same = torch.equal(beside.tensor("blocks.0.mlp.up.weight"), checkpoint.tensor("blocks.0.mlp.up.weight"))
        assert same == (other > MERGED_AFTER)


def test_a_run_goes_on_in_other_layouts(settings: Settings, tmp_path: Path) -> None:
    """Step by step through tp, dp with ZeRO, and a pipeline, it follows the run that stays in one process."""
    whole = relora(settings, tmp_path / "whole")
    expected = run(whole)
    layouts: dict[int, dict[str, Any]] = {
        3: {"parallel__dp": 2, "parallel__tp": 2, "parallel__zero": 3},
        4: {"parallel__pp": 2, "train__micro_batch_size": 1},
        5: {"parallel__tp": 4, "train__recompute": "block"},
    }
    for step, layout in layouts.items():
        cut(whole, tmp_path / str(step), step)
        found = run(relora(settings, tmp_path / str(step), **layout))
        for record, reference in zip(found, expected, strict=True):
            for name in ("loss", "grad_norm"):
                assert record[name] == pytest.approx(reference[name], rel=1e-9), (layout, record["step"])


def test_a_full_rank_warm_start(settings: Settings, tmp_path: Path) -> None:
    """Begins with the function that the dense run ended with, in one process and in a pipeline; and a dense run cannot
    take what ReLoRA has."""
    shape = {name: RELORA[name] for name in ("model__ffn_size", "model__tie_embeddings")}
    dense = with_changes(settings, run__dir=str(tmp_path / "dense"), model__linear="dense", model__rank=None, **shape)
    run(dense)
    ids = torch.arange(40).reshape(2, 20)
    before = boost.load_model(dense.run.dir)(ids)
    for name, layout in {
        "one": {},
        "pipeline": {"parallel__pp": 2, "train__micro_batch_size": 1},
        "sharded": {"parallel__dp": 2, "parallel__zero": 3, "parallel__tp": 2},
    }.items():
        started = relora(settings, tmp_path / name, run__init_from=dense.run.dir, train__steps=0, **layout)
        run(started)
        assert torch.equal(boost.load_model(started.run.dir)(ids), before)
        down = open_checkpoint(started.run.dir).tensor("blocks.1.mlp.up.down.weight")
        assert down.any()
    warm = relora(settings, tmp_path / "warm", run__init_from=dense.run.dir)
    run(warm)
    assert metrics(warm)[-1]["loss"] < metrics(dense)[-1]["loss"]
    back = with_changes(
        settings,
        run__dir=str(tmp_path / "back"),
        run__init_from=warm.run.dir,
        model__linear="dense",
        model__rank=None,
        **shape,
    )
    with pytest.raises(UserError, match=r"the model has no parameter blocks\.0\.attention\.k\.down\.weight"):
        run(back)


def test_the_length_of_a_cycle_is_fixed(settings: Settings, tmp_path: Path) -> None:
    whole = relora(settings, tmp_path / "run")
    run(whole)
    longer = relora(settings, tmp_path / "run", train__steps=8, optimizer__restart_every=4)
    with pytest.raises(UserError, match=r"optimizer\.restart_every: differs .*expected 3, got 4"):
        run(longer)


def test_bf16_leaves_frozen_masters_as_they_are(settings: Settings, tmp_path: Path) -> None:
    """ZeRO gathers them rounded; what is saved before the first merge is still what was drawn, in fp32."""
    plain = run(relora(settings, tmp_path / "plain", train__precision="bf16"))
    config = relora(settings, tmp_path / "run", train__precision="bf16", parallel__dp=2, parallel__zero=2)
    found = run(config)
    for record, reference in zip(found, plain, strict=True):
        assert record["loss"] == pytest.approx(reference["loss"], rel=1e-3)
    run(relora(settings, tmp_path / "drawn", train__precision="bf16", train__steps=0))
    name = "blocks.1.mlp.down.weight"
    drawn, before, merged = (
        open_checkpoint(tmp_path / path).tensor(name)
        for path in ("drawn", f"run/checkpoints/step-{MERGED_AFTER - 1}", f"run/checkpoints/step-{MERGED_AFTER}")
    )
    assert drawn.dtype == torch.float32
    assert torch.equal(before, drawn)
    assert not torch.equal(merged, drawn)
