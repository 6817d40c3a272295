"""SLTrain runs: supports stay with their values, over resumes in other layouts, other seeds and other runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import boost
from boost.checkpoint.slices import Slice
from boost.checkpoint.store import open_checkpoint, save
from boost.checkpoint.weights import SUPPORT, check_supports, load_weights, saved_supports
from boost.errors import UserError
from boost.inference.generate import generate
from boost.model.decoder import Decoder
from boost.parallel.mesh import Group, Mesh
from tests.distributed.harness import run_ranks
from tests.training.conftest import with_changes
from tests.training.runs import losses, run, state_hash
from tests.training.test_loop import _saved_again

pytestmark = pytest.mark.slow
Settings = dict[str, Any]
VALUES = "blocks.1.mlp.down.sparse.values"


@pytest.fixture
def sltrain(settings: Settings) -> Settings:
    """Uniform supports, an MLP that no tp divides; the learning rate does not know where a run ends."""
    settings["model"] |= {"linear": "sltrain", "ffn_size": 43, "sparse_density": 0.05, "tie_embeddings": True}
    settings["schedule"]["name"] = "constant"
    return settings


def in_directory(settings: Settings, tmp_path: Path, name: str, **changes: Any) -> Any:
    return with_changes(settings, run__dir=str(tmp_path / name), **changes)


def test_a_run_goes_on_in_other_layouts(sltrain: Settings, tmp_path: Path) -> None:
    """Layouts take turns and train as one process does. A later part's other seed draws no other supports."""
    layouts: list[dict[str, Any]] = [
        {"parallel__tp": 2},
        {"parallel__pp": 2, "parallel__tp": 2, "train__micro_batch_size": 1},
        {"parallel__dp": 2, "parallel__tp": 2, "parallel__zero": 3, "train__seed": 5},
    ]
    whole = in_directory(sltrain, tmp_path, "whole", train__steps=3)
    run(whole)
    for steps, layout in enumerate(layouts, 1):
        parts = in_directory(sltrain, tmp_path, "parts", train__steps=steps, checkpoint__keep=0, **layout)
        run(parts)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-9)
    first, last = (open_checkpoint(Path(parts.run.dir) / "checkpoints" / f"step-{step}") for step in (1, 3))
    supports = [key for key in first.tensors if key[0] == SUPPORT]
    assert len(supports) == 14
    for key in supports:
        assert first.tensors[key].sha256 == last.tensors[key].sha256
        assert first.tensors[key].dtype == "I32"
        assert first.tensors[key].shape == first.tensors["parameter", key[1]].shape


def test_layouts_save_what_they_load(sltrain: Settings, tmp_path: Path) -> None:
    """Values, moments and supports, cut unevenly: one hash, from tp 2 over tp 4, one process and a pipeline."""
    config = in_directory(sltrain, tmp_path, "run", train__steps=2, parallel__tp=2, parallel__dp=2, parallel__zero=3)
    run(config)
    source = config.run.dir
    for number, changes in enumerate([{"parallel__tp": 4}, {}, {"parallel__pp": 2, "parallel__tp": 2}]):
        other = in_directory(sltrain, tmp_path, "other", **changes, train__micro_batch_size=1)
        target, parallel = tmp_path / f"again-{number}", other.parallel
        if changes:
            layout = (parallel.pp, parallel.dp, parallel.tp)
            run_ranks(parallel.pp * parallel.dp * parallel.tp, _saved_again, other, source, target, layout=layout)
        else:
            _saved_again(Mesh(), other, source, target)
        assert open_checkpoint(target).state_hash == state_hash(config)
        source = str(target)


def test_one_state_has_one_hash(sltrain: Settings, tmp_path: Path) -> None:
    """The initial state of a model with block-diagonal supports, in three layouts."""
    sltrain["model"] |= {"sparse_support": "block_diagonal", "ffn_size": 44, "sparse_blocks": 4}
    hashes = set()
    zero = {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 2, "parallel__group_linears": False}
    for number, changes in enumerate([{}, {"parallel__tp": 4}, zero]):
        config = in_directory(sltrain, tmp_path, str(number), train__steps=0, **changes)
        run(config)
        hashes.add(state_hash(config))
    assert len(hashes) == 1


def test_weights_bring_their_supports(sltrain: Settings, tmp_path: Path) -> None:
    """A run of another seed that starts from weights has their supports; what fits nowhere is refused by name."""
    first = in_directory(sltrain, tmp_path, "first", train__steps=3)
    run(first)
    second = in_directory(
        sltrain, tmp_path, "second", run__init_from=first.run.dir, train__seed=7, train__steps=0, parallel__tp=2
    )
    run(second)
    before, after = open_checkpoint(first.run.dir), open_checkpoint(second.run.dir)
    for kind in ("parameter", SUPPORT):
        assert torch.equal(before.tensor(VALUES, kind), after.tensor(VALUES, kind))
    ids = torch.arange(20).view(2, 10)
    one, two = boost.load_model(first.run.dir), boost.load_model(second.run.dir)
    with torch.no_grad():
        assert torch.equal(one(ids), two(ids))
    assert list(generate(one, [1, 2, 3], 8)) == list(generate(two, [1, 2, 3], 8))
    stranger = Decoder(second.model, dtype=torch.float64, seed=7)
    with pytest.raises(UserError, match=r"support blocks\.0\.attention\.q\.sparse\.values is not that of the model"):
        load_weights(before, stranger, Group())
    with pytest.raises(UserError, match=r"support blocks\.0\.attention\.q\.sparse\.values has \[51\] positions"):
        run(in_directory(sltrain, tmp_path, "third", run__init_from=first.run.dir, model__sparse_density=0.06))
    blocks = {"model__sparse_support": "block_diagonal", "model__sparse_blocks": 4}
    model = in_directory(sltrain, tmp_path, "fourth", **blocks, model__ffn_size=44).model
    with pytest.raises(UserError, match="outside of the 4 blocks"):
        Decoder(model, supports=saved_supports(before, model))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_support_from_elsewhere_loads(
    sltrain: Settings, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that we would not draw, saved in the published order: ascending, row by row. None is drawn then."""
    config = in_directory(sltrain, tmp_path, "run", train__steps=0)
    run(config)
    opened = open_checkpoint(config.run.dir)
    tensors = {(name, kind): opened.tensor(name, kind) for kind, name in opened.tensors}
    foreign = torch.arange(len(tensors[VALUES, SUPPORT]), dtype=dtype)
    tensors[VALUES, SUPPORT] = foreign
    slices = [
        Slice(name, kind, tuple(value.shape), (0,) * value.dim(), value) for (name, kind), value in tensors.items()
    ]
    files = {name: opened.read_file(name) for name in ("config.yaml", "tokenizer.json")}
    save(tmp_path / "elsewhere", 0, slices, opened.state, files=files)
    monkeypatch.delattr("boost.model.sparse.generator_of")
    model = boost.load_model(tmp_path / "elsewhere")
    check_supports(open_checkpoint(tmp_path / "elsewhere"), model, Group())
    for tp in (1, 2):
        again = in_directory(
            sltrain, tmp_path, f"again-{tp}", run__init_from=str(tmp_path / "elsewhere"), parallel__tp=tp
        )
        run(again)
        assert torch.equal(open_checkpoint(again.run.dir).tensor(VALUES, SUPPORT), foreign.int())
