"""Exported directories compute what our model computes, in a process that has no `boost`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import boost
from boost.errors import UserError
from boost.inference.generate import generate
from boost.interop import auto_classes, huggingface, names
from boost.interop.huggingface import export
from boost.interop.names import foreign_name
from tests.interop.checkpoints import write_checkpoint
from tests.models import distance, tensors, tokens

SVD = {"bottleneck_activation": "none"}
BIASES = {"attention_bias": True, "mlp_bias": True}
UNUSUAL = {"norm_eps": 0.03, "rope_theta": 371.0}
BLOCKS = {"linear": "sltrain", "sparse_support": "block_diagonal", "sparse_blocks": 4, "sparse_density": 0.25}
CASES: dict[str, dict[str, Any]] = {
    "cola": {},
    "cola_gqa_4_2_tied": {"kv_heads": 2, "tie_embeddings": True},
    "cola_gqa_6_3_biases": {"hidden_size": 36, "heads": 6, "kv_heads": 3, "head_size": 10, **BIASES},
    "cola_no_gate": {"gate_activation": "none", "kv_heads": 1, **UNUSUAL},
    "cola_gqa_8_2": {"heads": 8, "kv_heads": 2, "head_size": 6, **BIASES},
    "lax_identity": {**SVD, "crossing": "identity", "layers": 3, "kv_heads": 2},
    "lax_diagonal": {"crossing": "diagonal", "heads": 8, "kv_heads": 4, "head_size": 6, **BIASES},
    "lax_dense": {**SVD, **UNUSUAL, "crossing": "dense", "tie_embeddings": True, "kv_heads": 1},
    "lax_tensor": {"crossing": "tensor", "layers": 3, "head_size": 10, "gate_activation": "none"},
    "lax_saved_again": {"crossing": "diagonal", "layers": 3, "kv_heads": 2},
    "svd_unusual": {**SVD, **UNUSUAL, "tie_embeddings": True},
    "svd_merged": {**SVD, **UNUSUAL, **BIASES, "kv_heads": 2},
    "svd_merged_tied": {**SVD, "kv_heads": 1, "tie_embeddings": True, "head_size": 8},
    "relora_merged": {"linear": "relora", "lora_alpha": 5.0, "lora_dropout": 0.1, "kv_heads": 2, **BIASES},
    "relora_merged_tied": {"linear": "relora", "rank": 7, "tie_embeddings": True, "head_size": 10, **UNUSUAL},
    "sltrain_merged": {"linear": "sltrain", "kv_heads": 2, "lora_alpha": 9.0, "sparse_density": 0.1, **BIASES},
    "sltrain_merged_blocks": {**BLOCKS, "tie_embeddings": True, "head_size": 8, **UNUSUAL},
    "dense": {"linear": "dense", "kv_heads": 2, **BIASES},
    "dense_tied_no_gate": {"linear": "dense", "tie_embeddings": True, "gate_activation": "none", **UNUSUAL},
}
VOCABULARY = 4099  # more than the tokenizer has, and odd


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """All cases exported, and what they compute in one process without `boost`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root = tmp_path_factory.mktemp("exports")
    for name, changes in CASES.items():
        run = root / f"{name}.run"
        write_checkpoint(run, vocab_size=VOCABULARY, **changes)
        exported = root / f"{name}.first" if "again" in name else root / name
        export(run, exported, merge="merged" in name, shard_bytes=300_000 if name == "cola" else 1 << 30)
        if "again" in name:  # by transformers with our class, whose file must come along
            AutoModelForCausalLM.from_pretrained(exported).save_pretrained(root / name)
            AutoTokenizer.from_pretrained(exported).save_pretrained(root / name)
        save_file({"ids": ids_of(boost.load_model(run).model)}, root / f"{name}.ids.safetensors")
    results = root / "results.safetensors"
    script = Path(__file__).with_name("load_elsewhere.py")
    # Isolated: neither PYTHONPATH nor the script's folder is searched. The cache of remote code stays in `root`.
    command = [sys.executable, "-I", str(script), str(results), *(str(root / name) for name in CASES)]
    environment = {**os.environ, "HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "newly initialized" not in done.stderr and "not used" not in done.stderr, done.stderr
    return root, load_file(results)


def ids_of(model: Any) -> Tensor:
    return tokens(model, batch=2, sequence=40)[0].contiguous()


@pytest.mark.parametrize("name", CASES)
def test_logits_elsewhere_equal_ours(elsewhere: tuple[Path, dict[str, Tensor]], name: str) -> None:
    root, results = elsewhere
    model = boost.load_model(root / f"{name}.run")
    with torch.no_grad():
        ours = model(ids_of(model.model))
    assert results[f"{name}.logits"].shape == (2, 40, VOCABULARY)
    assert distance(results[f"{name}.logits"], ours) <= 1e-5
    assert (results[f"{name}.logits"] - ours).abs().max() <= 1e-5 * ours.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_generation_elsewhere_with_cache_equals_generation_without_and_ours(
    elsewhere: tuple[Path, dict[str, Tensor]], name: str
) -> None:
    root, results = elsewhere
    model = boost.load_model(root / f"{name}.run")
    cached, whole = results[f"{name}.cached"], results[f"{name}.whole"]
    assert cached.shape == (2, 52)
    assert torch.equal(cached, whole)
    ids = ids_of(model.model)
    for row in range(2):
        assert list(generate(model, ids[row].tolist(), 12, temperature=0)) == cached[row, 40:].tolist()


def test_files(elsewhere: tuple[Path, dict[str, Tensor]]) -> None:
    """Files of each kind of export; weights in several files with an index; nothing of the run or the machine."""
    root, _ = elsewhere
    common = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (root / "svd_unusual").iterdir()} == common | {
        "model.safetensors",
        "modeling_boost.py",
    }
    assert {path.name for path in (root / "svd_merged").iterdir()} == common | {"model.safetensors"}
    index = json.loads((root / "cola" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (root / "cola").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert sorted(set(index["weight_map"].values())) == shards
    text = "".join(path.read_text() for path in (root / "cola").glob("*.json") if path.name != "tokenizer.json")
    assert str(root) not in text
    assert not list(root.glob(".*"))


@pytest.mark.parametrize(
    "imports",
    [
        # LLaMA's import reaches transformers' table while LLaMA is not there yet.
        "import sys, boost; assert not {'torch', 'transformers'} & {*sys.modules}; from transformers import LlamaModel",
        "from transformers import AutoModelForCausalLM; import boost",
    ],
    ids=["boost-first", "transformers-first"],
)
def test_with_boost_imported_no_remote_code_is_needed(elsewhere: tuple[Path, dict[str, Tensor]], imports: str) -> None:
    """In either order, and the import of `boost` stays light."""
    root, _ = elsewhere
    code = (
        f"{imports}; import sys; from transformers import AutoConfig, AutoModelForCausalLM\n"
        "assert type(AutoConfig.for_model('boost', rank=7)).__name__ == 'BoostConfig'\n"
        "assert AutoConfig.from_pretrained(sys.argv[1]).rank == 6\n"
        "assert not any('boost' in type(finder).__module__ for finder in sys.meta_path)\n"
        "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__module__)"
    )
    environment = {**os.environ, "HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, str(root / "cola")]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["boost.interop.modeling_boost"]


def test_a_table_that_takes_no_entry_is_left_alone() -> None:
    """Another's `boost` stays, and a table with other names does not break the import of transformers."""
    registered: list[Any] = []
    auto = SimpleNamespace(register=lambda *arguments: registered.append(arguments))
    auto_classes._enter(cast(Any, SimpleNamespace(CONFIG_MAPPING={"boost": int}, AutoConfig=auto)))
    auto_classes._enter(cast(Any, SimpleNamespace(AutoConfig=auto)))
    assert not registered
    auto_classes._enter(cast(Any, SimpleNamespace(CONFIG_MAPPING={}, AutoConfig=auto)))
    assert registered == [("boost", auto_classes.StandIn)]


def test_another_format_is_one_clear_error(elsewhere: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    from transformers import AutoConfig

    from boost.interop.modeling_boost import FORMAT

    assert names.EXPORT_FORMAT == FORMAT
    for name in ("cola", "lax_saved_again"):
        fields = json.loads((elsewhere[0] / name / "config.json").read_text())
        assert fields["export_format"] == FORMAT
        (tmp_path / "config.json").write_text(json.dumps({**fields, "export_format": 2}))
        with pytest.raises(ValueError, match=r"^export_format: expected 1, got 2; .* is of another version of boost"):
            AutoConfig.from_pretrained(tmp_path)


def test_threads_share_an_exported_model(elsewhere: tuple[Path, dict[str, Tensor]]) -> None:
    """Both are past layer 0 before either is in layer 1, which takes up what layer 0 hands on."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(elsewhere[0] / "lax_diagonal").eval()
    inputs = [torch.tensor([[5, 6, 7]]), torch.tensor([[40, 2, 30]])]
    alone = [model(ids).logits.detach() for ids in inputs]
    barrier = threading.Barrier(2, timeout=60)
    model.model.layers[0].register_forward_hook(lambda *_: [barrier.wait(), None][1])
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda ids: model(ids).logits.detach(), inputs))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("lax")])
def test_gradients_go_through_exported_crossings(elsewhere: tuple[Path, dict[str, Tensor]], name: str) -> None:
    """Every parameter's gradient; recomputing layers, which would miss crossings, is refused."""
    from transformers import AutoModelForCausalLM

    root, _ = elsewhere
    ours = boost.load_model(root / f"{name}.run", dtype=torch.float64)
    theirs = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float64)
    ids = ids_of(ours.model)
    ours(ids).square().sum().backward()
    theirs(ids).logits.square().sum().backward()
    grads = dict(theirs.named_parameters())
    for canonical, gradient in tensors(ours, gradients=True).items():
        reference = grads[foreign_name(canonical, low_rank=True)].grad
        assert reference is not None and distance(reference, gradient) <= 1e-5, canonical
    with pytest.raises(ValueError, match="does not support"):
        theirs.gradient_checkpointing_enable()


def test_fp64_stays_fp64(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", dtype=torch.float64)
    export(tmp_path / "run", tmp_path / "out")
    assert {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float64}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float64"


def test_refusals(tmp_path: Path) -> None:
    """An existing target is left alone; what cannot be merged says why."""
    run = tmp_path / "run"
    write_checkpoint(run)
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match=r"taken: exists already"):
        export(run, tmp_path / "taken")
    assert not list((tmp_path / "taken").iterdir())
    with pytest.raises(UserError, match=r"--merge: .*model\.bottleneck_activation = silu lies between"):
        export(run, tmp_path / "out", merge=True)
    with pytest.raises(UserError, match=r"absent/out: cannot be written: No such file"):
        export(run, tmp_path / "absent" / "out")
    write_checkpoint(tmp_path / "dense", linear="dense")
    with pytest.raises(UserError, match=r"--merge: a dense model has no factors"):
        export(tmp_path / "dense", tmp_path / "out", merge=True)
    write_checkpoint(tmp_path / "lax", crossing="identity", bottleneck_activation="none")
    with pytest.raises(UserError, match=r"--merge: .*model\.crossing = identity adds another block's bottleneck"):
        export(tmp_path / "lax", tmp_path / "out", merge=True)
    for linear in ("relora", "sltrain"):
        write_checkpoint(tmp_path / linear, linear=linear)
        with pytest.raises(
            UserError, match=rf"model\.linear: {linear} is exported as one matrix per linear; add --merge"
        ):
            export(tmp_path / linear, tmp_path / "out")
    write_checkpoint(tmp_path / "uneven", heads=6)
    with pytest.raises(UserError, match=r"model\.heads: cannot be exported.*expected a divisor of 32, got 6"):
        export(tmp_path / "uneven", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_or_killed_export_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out, left = tmp_path / "run", tmp_path / "out", tmp_path / ".out.partial"
    write_checkpoint(run)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "save_file", full)
    with pytest.raises(UserError, match=r"out: cannot be written: No space left") as caught:
        export(run, out)
    assert caught.value.exit_code == 3
    assert not out.exists() and not left.exists()
    monkeypatch.undo()
    left.mkdir()  # of an export that was killed
    (left / "half.safetensors").write_bytes(b"half")
    export(run, out)
    assert not left.exists() and not (out / "half.safetensors").exists()
