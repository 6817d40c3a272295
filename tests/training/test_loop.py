"""The loop: one trajectory whatever the layout, exact resume, and what it reports."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.checkpoint.saver import Saver
from boost.checkpoint.store import open_checkpoint
from boost.config import TrainConfig
from boost.data.prepare import prepare
from boost.errors import NumericsError, UserError
from boost.parallel.mesh import Mesh
from boost.parallel.sharding import held_rows
from boost.training import loop
from boost.training.loop import build_model, train
from boost.training.optimizers.adamw import build_adamw
from boost.training.run_directory import RunDirectory
from boost.training.state import load_state, save_state
from tests.distributed.harness import run_ranks
from tests.training.conftest import with_changes
from tests.training.runs import losses, metrics, run, state_hash

pytestmark = pytest.mark.slow

Settings = dict[str, Any]


def in_directory(settings: Settings, tmp_path: Path, name: str, **changes: Any) -> TrainConfig:
    return with_changes(settings, run__dir=str(tmp_path / name), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__tp": 2},
        {"parallel__tp": 4, "parallel__group_linears": False},
        {"parallel__dp": 2},
        {"parallel__dp": 2, "parallel__tp": 2},
        {"parallel__dp": 2, "parallel__zero": 1, "train__micro_batch_size": 1},
        {"parallel__dp": 2, "parallel__tp": 2, "parallel__zero": 3, "train__micro_batch_size": 1},
        {"train__micro_batch_size": 1},
        {"parallel__tp": 2, "parallel__tensor_layout": "vanilla"},
        {"parallel__tp": 2, "parallel__overlap": "weight_grads", "train__recompute": "latent"},
        {"parallel__tp": 2, "parallel__overlap": "split_batch", "train__recompute": "latent"},
        {
            "parallel__tp": 2,
            "parallel__overlap": "weight_grads",
            "parallel__tensor_layout": "vanilla_sharded_heads",
            "train__micro_batch_size": 2,
            "train__recompute": "block",
        },
        {
            "parallel__tp": 2,
            "parallel__dp": 2,
            "parallel__zero": 3,
            "parallel__overlap": "weight_grads",
            "train__micro_batch_size": 1,
            "model__linear": "dense",
            "model__rank": None,
        },
        {"parallel__tp": 2, "train__micro_batch_size": 2, "model__tie_embeddings": True},
        # Of the validation's 38 sequences a dp rank has 19, which a pipeline takes by twos: the last pass is padded.
        {
            "parallel__pp": 2,
            "parallel__dp": 2,
            "parallel__zero": 3,
            "train__micro_batch_size": 1,
            "model__tie_embeddings": True,
        },
        {
            "parallel__pp": 2,
            "parallel__dp": 2,
            "parallel__zero": 2,
            "train__micro_batch_size": 1,
            "model__layers": 5,
            "parallel__pipeline_schedule": "zbv",
        },
    ],
    ids=str,
)
def test_every_layout_follows_one_trajectory(settings: Settings, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Loss, clipped gradient norm and data of each of 6 steps equal the single process's; so do the validations."""
    model = {name: value for name, value in changes.items() if name.startswith("model")}
    common = {"train__validate_every": 3, **model}
    single = run(in_directory(settings, tmp_path, "single", **common))
    other = run(in_directory(settings, tmp_path, "other", **common | changes))
    assert [record["step"] for record in other] == [1, 2, 3, 4, 5, 6]
    assert single[-1]["grad_norm"] > settings["optimizer"]["clip"], "clipping must be at work"
    for record, reference in zip(other, single, strict=True):
        assert record["batch_hash"] == reference["batch_hash"]
        for name in ("loss", "grad_norm", "val_loss", "val_bits_per_byte"):
            assert (name in record) == (name in reference)
            if name in record:
                assert record[name] == pytest.approx(reference[name], rel=1e-9), name


@pytest.mark.parametrize(
    "layout", [{}, {"parallel__tp": 2}, {"parallel__dp": 2}, {"parallel__dp": 2, "parallel__zero": 2}], ids=str
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_is_bit_identical(settings: Settings, tmp_path: Path, layout: dict[str, Any], precision: str) -> None:
    """4 + 4 + 4 steps over three starts equal 12 in one, dropout included."""
    common = {
        **layout,
        "train__steps": 12,
        "train__precision": precision,
        "model__dropout": 0.1,
        "checkpoint__every": 4,
        "checkpoint__keep": 0,
    }
    whole = in_directory(settings, tmp_path, "whole", **common)
    run(whole)
    parts = in_directory(settings, tmp_path, "parts", **common)
    run(parts)
    for step in (4, 8):
        # What a kill after a checkpoint leaves: metrics of later steps, no later checkpoint.
        for later in range(step + 4, 13, 4):
            shutil.rmtree(Path(parts.run.dir) / "checkpoints" / f"step-{later}", ignore_errors=True)
        run(parts)
        assert losses(parts) == losses(whole)
        assert state_hash(parts) == state_hash(whole)
    assert [record["step"] for record in metrics(parts)] == list(range(1, 13))


def test_state_survives_a_change_of_layout(settings: Settings, tmp_path: Path) -> None:
    """Saved at (dp 2, tp 2) with ZeRO 3, loaded and saved again in other layouts: the same hash each time.

    Sizes do not divide: rows are shared out unevenly, of rank 6 over 4 and of d_ff 43 there is padding.
    """
    settings["model"] |= {"ffn_size": 43, "tie_embeddings": True, "attention_bias": True}
    config = in_directory(settings, tmp_path, "run", parallel__tp=2, parallel__dp=2, parallel__zero=3)
    run(config)
    before = state_hash(config)
    layouts: list[dict[str, Any]] = [
        {"parallel__tp": 4},
        {"parallel__dp": 4, "parallel__zero": 1},
        {"parallel__dp": 4, "parallel__zero": 2, "parallel__dp_replicate": 2, "parallel__tensor_layout": "vanilla"},
        {"parallel__group_linears": False},
        {"parallel__tp": 2, "parallel__tensor_layout": "vanilla"},
        {"parallel__pp": 2, "train__micro_batch_size": 1},
    ]
    for number, changes in enumerate(layouts):
        other = in_directory(settings, tmp_path, f"other-{number}", **changes, checkpoint__keep=0)
        shutil.copytree(config.run.dir, other.run.dir)
        run(other)  # nothing left to train: it loads and ends
        assert state_hash(other) == before
        longer = with_changes(
            settings, run__dir=other.run.dir, train__steps=7, **changes, checkpoint__keep=0, optimizer__lr=1e-30
        )
        run(longer)
        assert state_hash(longer, 6) == before
        assert state_hash(longer, 7) != before, "the moments move"


def test_a_run_goes_on_in_other_layouts(settings: Settings, tmp_path: Path) -> None:
    """Part at a pipeline with tp, part at dp 4 with ZeRO 3, ... follow the uninterrupted run."""
    settings["schedule"]["name"] = "constant"  # a cosine would know where the parts end
    layouts: list[dict[str, Any]] = [
        {"parallel__pp": 2, "parallel__tp": 2, "train__micro_batch_size": 1},
        {"parallel__dp": 4, "parallel__zero": 3},
        {"parallel__tp": 4},
        {"parallel__dp": 2, "parallel__tp": 2, "parallel__zero": 3},
        {"parallel__dp": 4, "parallel__zero": 1},
        {},
    ]
    whole = run(in_directory(settings, tmp_path, "whole"))
    for steps, layout in enumerate(layouts, 1):
        parts = run(in_directory(settings, tmp_path, "parts", train__steps=steps, **layout))
    assert [record["batch_hash"] for record in parts] == [record["batch_hash"] for record in whole]
    for record, reference in zip(parts, whole, strict=True):
        for name in ("loss", "grad_norm"):
            assert record[name] == pytest.approx(reference[name], rel=1e-9)


def test_a_run_in_fp32_is_resharded_twice(settings: Settings, tmp_path: Path) -> None:
    """(tp 2, pp 2), from step 2 at dp 4 with ZeRO 3, from step 4 at tp 4: as if it had stayed at (tp 2, pp 2).

    Each layout gives back the state it took over, bit for bit; sizes do not divide, and the schedule is a cosine.
    """
    settings["model"] |= {"ffn_size": 43, "tie_embeddings": True, "attention_bias": True}
    layouts: list[dict[str, Any]] = [
        {"parallel__tp": 2, "parallel__pp": 2, "train__micro_batch_size": 1},
        {"parallel__dp": 4, "parallel__zero": 3},
        {"parallel__tp": 4},
    ]
    common = {"train__precision": "fp32", "checkpoint__every": 2, "checkpoint__keep": 0}
    configs = [in_directory(settings, tmp_path, "run", **common, **layout) for layout in layouts]
    whole = run(configs[0])
    for step, config in zip((2, 4), configs[1:], strict=True):
        for later in range(step + 2, 7, 2):
            shutil.rmtree(Path(config.run.dir) / "checkpoints" / f"step-{later}")
        before = state_hash(config)
        again = tmp_path / f"again-{step}"
        save_again(config, config.run.dir, again)
        assert open_checkpoint(again).step == step
        assert open_checkpoint(again).state_hash == before
        parts = run(config)
    assert [record["batch_hash"] for record in parts] == [record["batch_hash"] for record in whole]
    assert parts[-1]["loss"] < parts[0]["loss"] - 0.1
    for record, reference in zip(parts, whole, strict=True):
        assert record["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert record["lr"] == reference["lr"]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("bf16", 1e-3)])
def test_a_pipelined_run_goes_on_in_one_process_and_back(
    settings: Settings, tmp_path: Path, precision: str, tolerance: float
) -> None:
    common = {
        "schedule__name": "constant",
        "model__dropout": 0.1,
        "train__micro_batch_size": 2,
        "train__precision": precision,
    }
    pipeline = {"parallel__pp": 2}
    for steps, changes in ((2, pipeline), (4, {}), (6, pipeline)):
        config = in_directory(settings, tmp_path, "run", **common, train__steps=steps, **changes)
        run(config)
    single = in_directory(settings, tmp_path, "single", **common)
    run(single)
    assert [r["batch_hash"] for r in metrics(config)] == [r["batch_hash"] for r in metrics(single)]
    assert losses(config) == pytest.approx(losses(single), rel=tolerance)


def _saved_again(mesh: Mesh, config: TrainConfig, source: str | Path, target: Path) -> None:
    model = build_model(config, mesh)
    optimizer = build_adamw(model, config.optimizer)
    step = load_state(open_checkpoint(source), model, optimizer, mesh.tp)
    save_state(Saver(mesh.world, asynchronous=False), target, step, model, optimizer, config, mesh, "", b"")


def save_again(config: TrainConfig, source: str | Path, target: Path) -> None:
    """Loads a run's newest checkpoint in the layout of `config` and saves it as it is."""
    parallel = config.parallel
    layout = (parallel.pp, parallel.dp, parallel.tp)
    if layout == (1, 1, 1):
        _saved_again(Mesh(), config, source, target)
    else:
        run_ranks(math.prod(layout), _saved_again, config, source, target, layout=layout, shards=parallel.shards)


def test_every_layout_saves_what_it_loads(settings: Settings, tmp_path: Path) -> None:
    """From a pipeline over one process and other pipelines back to it: one hash of parameters and moments."""
    layouts: list[dict[str, Any]] = [
        {"parallel__pp": 2, "parallel__tp": 2},
        {},
        {"parallel__pp": 2, "parallel__pipeline_schedule": "zbv", "parallel__dp": 2, "parallel__zero": 2},
        {"parallel__tp": 2, "parallel__tensor_layout": "vanilla"},
        {"parallel__pp": 4, "parallel__pipeline_schedule": "gpipe"},
    ]
    common = {"model__layers": 5, "model__tie_embeddings": True, "train__micro_batch_size": 1, "model__ffn_size": 43}
    configs = [in_directory(settings, tmp_path, str(n), **common, **changes) for n, changes in enumerate(layouts)]
    run(configs[0])
    source: str | Path = configs[0].run.dir
    for number, config in enumerate([*configs[1:], configs[0]]):
        target = tmp_path / f"again-{number}"
        save_again(config, source, target)
        assert open_checkpoint(target).state_hash == state_hash(configs[0]), config.parallel
        source = target


def test_initial_state_does_not_depend_on_the_layout(settings: Settings, tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [
        {},
        {"parallel__tp": 2},
        {"parallel__tp": 4},
        {"parallel__group_linears": False},
        {"parallel__tp": 2, "parallel__group_linears": False},
        {"parallel__tp": 2, "parallel__tensor_layout": "vanilla"},
        {"parallel__tp": 2, "parallel__tensor_layout": "vanilla_sharded_heads"},
        {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 3, "parallel__tensor_layout": "vanilla"},
        {"parallel__pp": 2, "parallel__tp": 2, "train__micro_batch_size": 1},
    ]
    hashes = []
    for number, changes in enumerate(layouts):
        # Sizes that do not divide: rank 6 over 4 (vanilla), d_ff 43 and a vocabulary of 4097.
        odd = {"model__ffn_size": 43, "model__vocab_size": 4097, "train__precision": "fp32"}
        config = in_directory(settings, tmp_path, str(number), train__steps=0, **odd, **changes)
        run(config)
        hashes.append(state_hash(config))
    assert len(set(hashes)) == 1


def test_init_from_takes_weights_and_nothing_else(settings: Settings, tmp_path: Path) -> None:
    first = in_directory(settings, tmp_path, "first", parallel__tp=2)
    before = run(first)
    second = in_directory(settings, tmp_path, "second", run__init_from=first.run.dir, train__precision="fp32")
    after = run(second)
    assert after[0]["step"] == 1
    assert after[0]["batch_hash"] == before[0]["batch_hash"]
    assert after[0]["loss"] < before[0]["loss"] - 0.5


def test_a_pipeline_takes_the_weights_of_one_process(settings: Settings, tmp_path: Path) -> None:
    first = in_directory(settings, tmp_path, "first", model__tie_embeddings=True)
    run(first)
    start = {"run__init_from": first.run.dir, "model__tie_embeddings": True, "parallel__pp": 2}
    second = in_directory(settings, tmp_path, "second", **start, train__micro_batch_size=1, train__steps=0)
    run(second)
    names = [name for kind, name in open_checkpoint(first.run.dir).tensors if kind == "parameter"]
    before, after = (open_checkpoint(config.run.dir) for config in (first, second))
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in names)
    deeper = in_directory(settings, tmp_path, "deeper", **start, train__micro_batch_size=1, model__layers=3)
    with pytest.raises(AssertionError, match=r"lacks parameter blocks\.2"):
        run(deeper)
    third = in_directory(settings, tmp_path, "third", model__layers=3)
    run(third)
    with pytest.raises(AssertionError, match=r"the model has no parameter blocks\.2"):
        run(
            in_directory(
                settings,
                tmp_path,
                "shallower",
                **start | {"run__init_from": third.run.dir, "model__tie_embeddings": False},
                train__micro_batch_size=1,
            )
        )


def test_metrics_have_the_documented_fields(settings: Settings, tmp_path: Path) -> None:
    records = run(in_directory(settings, tmp_path, "run", train__validate_every=4))
    names = {
        "step",
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "step_seconds",
        "tokens_per_second",
        "model_flops_per_second",
        "mfu",
        "peak_memory_bytes",
        "batch_hash",
    }
    for record in records:
        assert names <= record.keys()
        assert record["mfu"] is None, "a CPU's peak is unknown"
        assert record["tokens"] == record["step"] * 64
    assert [record["lr"] for record in records][:3] == [0.0, 0.005, 0.01]
    assert [record["val_step"] for record in records if "val_loss" in record] == [0, 4, 6]
    config = TrainConfig.load(str(tmp_path / "run" / "config.yaml"))
    assert config.train.steps == 6, "config.yaml can be loaded as it is"


def test_a_pipeline_reports_what_its_ranks_waited(settings: Settings, tmp_path: Path) -> None:
    for record in run(in_directory(settings, tmp_path, "run", parallel__pp=2, train__micro_batch_size=1)):
        assert 0 < record["pipeline_idle_seconds"] < record["step_seconds"]
        assert 0 < record["pipeline_idle"] < 1
    (record, *_) = run(in_directory(settings, tmp_path, "alone", train__steps=1))
    assert not {"pipeline_idle_seconds", "pipeline_idle"} & record.keys()


def test_not_finite_stops_before_the_update(settings: Settings, tmp_path: Path) -> None:
    config = in_directory(
        settings, tmp_path, "run", optimizer__lr=1e300, schedule__warmup_steps=0, checkpoint__every=1, train__steps=9
    )
    with pytest.raises(NumericsError, match=r"step \d: (loss|grad_norm) is (nan|inf)"):
        run(config)
    last = metrics(config)[-1]["step"]
    assert state_hash(config, last)
    assert all(math.isfinite(loss) for loss in losses(config))


def test_all_stages_stop_at_what_is_not_finite(settings: Settings, tmp_path: Path) -> None:
    """Each rank by itself, though only the last has the loss: the first to fail must not take the others with it."""
    fields = {"optimizer__lr": 1e300, "schedule__warmup_steps": 0, "parallel__pp": 2, "train__micro_batch_size": 1}
    messages = run_ranks(2, _failure, in_directory(settings, tmp_path, "run", **fields), layout=(2, 1, 1))
    assert messages[0] == messages[1]
    assert "step 2: loss is nan" in messages[0] or "step 2: grad_norm is" in messages[0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"parallel__dp": 2}, "weight"),
        ({"parallel__dp": 2, "parallel__zero": 2}, "gradient"),
        ({"parallel__tp": 2}, "weight"),
        ({"parallel__tp": 2}, "gradient"),
    ],
    ids=str,
)
def test_one_rank_that_is_not_finite_stops_all(
    settings: Settings, tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    """In the same step and before any update, though the others' own numbers may be fine."""
    config = in_directory(settings, tmp_path, "run", **changes)
    layout = (1, config.parallel.dp, config.parallel.tp)
    first, second = run_ranks(2, _poisoned, config, what, layout=layout, shards=config.parallel.shards)
    assert first == second
    assert first.startswith("step 2: grad_norm is nan" if what == "gradient" else "step 2: loss is nan")
    assert [record["step"] for record in metrics(config)] == [1]


def _poisoned(mesh: Mesh, config: TrainConfig, what: str) -> str:
    """Trains; in step 2 a number of rank 1 alone becomes nan: of a weight, or of a gradient just computed."""
    run_step, steps = loop.forward_backward, 0

    def poisoned(model: Any, *arguments: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        parameter = next(model.parameters())
        poison = steps == 2 and mesh.world.rank == 1
        if poison and what == "weight":
            held_rows(parameter.data)[0].fill_(math.nan)
        total = run_step(model, *arguments)
        if poison and what == "gradient":
            held_rows(parameter.grad)[0][-1, -1] = math.nan
        return total

    loop.forward_backward = poisoned  # in this process only
    return _failure(mesh, config)


def _failure(mesh: Mesh, config: TrainConfig) -> str:
    with pytest.raises(NumericsError) as caught:
        train(config, mesh, RunDirectory(config.run.dir))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__rank": 8}, r"model\.rank: differs from the checkpoint .* \(expected 6, got 8\)"),
        ({"model__rope_theta": 500.0}, r"model\.rope_theta: differs"),
        ({"model__tie_embeddings": True}, r"model\.tie_embeddings: differs"),
        ({"train__sequence_length": 8}, r"train\.sequence_length: differs"),
        ({"train__global_batch_size": 8}, r"train\.global_batch_size: differs"),
        ({"train__precision": "fp32"}, r"train\.precision: differs"),
        ({"data__seed": 5}, r"data\.seed: differs"),
        ({"run__resume": "false"}, r"run\.dir: .* holds checkpoints"),
    ],
    ids=str,
)
def test_resume_refuses_another_run(settings: Settings, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run(in_directory(settings, tmp_path, "run"))
    with pytest.raises(UserError, match=message):
        run(in_directory(settings, tmp_path, "run", **changes))


def test_resume_refuses_other_data(settings: Settings, tmp_path: Path, dataset: Path) -> None:
    run(in_directory(settings, tmp_path, "run"))
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    run(in_directory(settings, tmp_path, "run", data__path=str(copy)))  # the same data elsewhere is the same data
    other = tmp_path / "other"
    (tmp_path / "other.txt").write_text("nothing like it " * 400)
    prepare([str(tmp_path / "other.txt")], other, "bpe4096")
    with pytest.raises(UserError, match=r"data\.path: the dataset is not the one"):
        run(in_directory(settings, tmp_path, "run", data__path=str(other)))


def test_resume_accepts_a_longer_run_at_another_rate(settings: Settings, tmp_path: Path) -> None:
    run(in_directory(settings, tmp_path, "run"))
    records = run(in_directory(settings, tmp_path, "run", train__steps=9, optimizer__lr=1e-3))
    assert [record["step"] for record in records] == list(range(1, 10))
    assert records[-1]["lr"] < 1e-3


@pytest.mark.parametrize("steps", [6, 4])
def test_a_finished_run_is_left_as_it_is(
    settings: Settings, tmp_path: Path, steps: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = in_directory(settings, tmp_path, "run")
    run(config)
    files = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
    monkeypatch.setattr(loop.logger, "propagate", True)
    caplog.set_level("INFO", "boost")
    run(in_directory(settings, tmp_path, "run", train__steps=steps, optimizer__lr=1e-3))
    assert f"nothing to do: step 6 of {steps}; raise train.steps or choose another run.dir" in caplog.text
    assert {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()} == files


def test_what_has_no_effect_is_said(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("one document without another " * 20)
    prepare([str(tmp_path / "text.txt")], tmp_path / "whole", "bpe4096")
    monkeypatch.setattr(loop.logger, "propagate", True)
    caplog.set_level("INFO", "boost")
    run(in_directory(settings, tmp_path, "plain", train__steps=0, train__validate_every=2))
    assert "no effect" not in caplog.text
    changes = {"data__path": str(tmp_path / "whole"), "train__validate_every": 2, "parallel__zero": 1}
    run(in_directory(settings, tmp_path, "run", train__steps=0, **changes))
    assert f"train.validate_every has no effect: {tmp_path / 'whole'} has no validation split" in caplog.text
    assert "parallel.zero has no effect: parallel.dp is 1" in caplog.text


def test_bf16_trains_close_to_fp32_with_fp32_masters(settings: Settings, tmp_path: Path) -> None:
    reference = run(in_directory(settings, tmp_path, "fp32", train__precision="fp32", parallel__tp=2))
    config = in_directory(settings, tmp_path, "bf16", train__precision="bf16", parallel__tp=2)
    records = run(config)
    for record, expected in zip(records, reference, strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=5e-3)
    manifest = json.loads((Path(config.run.dir) / "checkpoints" / "step-6" / "manifest.json").read_text())
    assert {tensor["dtype"] for tensor in manifest["tensors"]} == {"F32"}
    assert {tensor["kind"] for tensor in manifest["tensors"]} == {"parameter", "exp_avg", "exp_avg_sq"}


def test_retention_keeps_the_newest(settings: Settings, tmp_path: Path) -> None:
    config = in_directory(settings, tmp_path, "run", checkpoint__every=1, checkpoint__keep=2, train__steps=11)
    run(config)
    kept = sorted(path.name for path in (Path(config.run.dir) / "checkpoints").iterdir())
    assert kept == ["step-10", "step-11"]


def test_canonical_names_and_shapes(settings: Settings, tmp_path: Path) -> None:
    """The names of the contract, whatever the layout that trained them."""
    config = in_directory(settings, tmp_path, "run", train__steps=0, parallel__tp=2, model__kv_heads=2)
    run(config)
    manifest = json.loads((Path(config.run.dir) / "checkpoints" / "step-0" / "manifest.json").read_text())
    shapes = {t["name"]: tuple(t["shape"]) for t in manifest["tensors"] if t["kind"] == "parameter"}
    expected: dict[str, tuple[int, ...]] = {
        "embedding.weight": (4096, 32),
        "norm.weight": (32,),
        "head.weight": (4096, 32),
    }
    for block in ("blocks.0", "blocks.1"):
        for name, (d_in, d_out) in {
            "attention.q": (32, 32),
            "attention.k": (32, 16),
            "attention.v": (32, 16),
            "attention.o": (32, 32),
            "mlp.gate": (32, 44),
            "mlp.up": (32, 44),
            "mlp.down": (44, 32),
        }.items():
            expected[f"{block}.{name}.down.weight"] = (6, d_in)
            expected[f"{block}.{name}.up.weight"] = (d_out, 6)
        expected[f"{block}.attention.norm.weight"] = expected[f"{block}.mlp.norm.weight"] = (32,)
    assert shapes == expected


def test_an_unset_dataset_is_named(settings: Settings, tmp_path: Path) -> None:
    config = in_directory(settings, tmp_path, "run", data__path=None)
    with pytest.raises(UserError, match=r"data\.path: is not set"):
        train(config, Mesh(), RunDirectory(config.run.dir))


def test_reading_ahead_changes_nothing(settings: Settings, tmp_path: Path) -> None:
    plain = run(in_directory(settings, tmp_path, "plain"))
    ahead = run(in_directory(settings, tmp_path, "ahead", data__num_workers=3))
    assert [(r["loss"], r["batch_hash"]) for r in plain] == [(r["loss"], r["batch_hash"]) for r in ahead]
