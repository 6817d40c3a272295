"""Foreign checkpoints come in with their function unchanged, and go out and in again as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import boost
from boost.checkpoint.store import open_checkpoint
from boost.checkpoint.weights import saved_config
from boost.errors import UserError
from boost.interop.huggingface import export
from boost.interop.importing import factors, import_checkpoint
from tests.golden.test_cola import FILES, Golden
from tests.interop.checkpoints import write_checkpoint
from tests.models import distance, tokens

DENSE: dict[str, Any] = {"linear": "dense", "vocab_size": 4099, "kv_heads": 2, "norm_eps": 0.03, "rope_theta": 371.0}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A dense model with biases, exported as transformers' LLaMA."""
    write_checkpoint(tmp_path / "run", **DENSE, attention_bias=True, mlp_bias=True)
    export(tmp_path / "run", tmp_path / "llama")
    return tmp_path / "llama"


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory: Path, change: Any) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {**DENSE, "attention_bias": True}),
        ("llama", {**DENSE, "tie_embeddings": True, "gate_activation": "none"}),
        ("boost", {"vocab_size": 4099, "kv_heads": 2, "attention_bias": True, "mlp_bias": True}),
        ("boost", {"vocab_size": 4099, "tie_embeddings": True, "bottleneck_activation": "none", "norm_eps": 0.03}),
        ("boost", {"vocab_size": 4099, "crossing": "dense", "bottleneck_activation": "none"}),
        ("boost", {"vocab_size": 4099, "crossing": "tensor", "tie_embeddings": True, "layers": 3}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_import_of_an_export_is_the_identity(
    kind: Any, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Out, in, out, in: the same tensors and the same model each time, and the same files."""
    first = open_checkpoint(write_checkpoint(tmp_path / "run", dtype=dtype, **changes))
    export(tmp_path / "run", tmp_path / "out1", shard_bytes=400_000)
    import_checkpoint(kind, tmp_path / "out1", tmp_path / "in1")
    export(tmp_path / "in1", tmp_path / "out2", shard_bytes=400_000)
    import_checkpoint(kind, tmp_path / "out2", tmp_path / "in2")
    for name in ("in1", "in2"):
        again = open_checkpoint(tmp_path / name)
        assert again.state_hash == first.state_hash
        assert saved_config(again).model == saved_config(first).model
        assert saved_config(again).train.sequence_length == 64
        assert again.read_file("tokenizer.json") == first.read_file("tokenizer.json")
    for path in (tmp_path / "out1").iterdir():
        assert (tmp_path / "out2" / path.name).read_bytes() == path.read_bytes()


def test_transformers_own_llama_comes_in(tmp_path: Path) -> None:
    """A directory that transformers wrote: logits to 1e-5."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=48, intermediate_size=70, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-3, initializer_range=0.2, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            assert parameter.abs().max() > 0, name
    theirs.save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match=r"hf: has no tokenizer\.json; name one with --tokenizer"):
        import_checkpoint("llama", tmp_path / "hf", tmp_path / "in")
    shutil.copy(Path(boost.__file__).parent / "data" / "corpora" / "bpe4096.json", tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"the tokenizer is not this model's"):
        import_checkpoint("llama", tmp_path / "hf", tmp_path / "in", tokenizer=str(tmp_path / "tokenizer.json"))
    small = json.loads((tmp_path / "tokenizer.json").read_text())
    small["model"] |= {"vocab": {"a": 0, "b": 1}, "merges": []}
    small["added_tokens"] = []
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(small))
    import_checkpoint("llama", tmp_path / "hf", tmp_path / "in")
    ours = boost.load_model(tmp_path / "in")
    ids = tokens(ours.model, batch=2, sequence=40)[0]
    with torch.no_grad():
        assert distance(ours(ids), theirs(ids).logits) <= 1e-5


def test_cutting_to_a_rank(llama: Path, tmp_path: Path) -> None:
    """Each pair is the best of its rank, balanced; the report says what it loses; twice gives the same."""
    report = import_checkpoint("llama", llama, tmp_path / "cut", rank=6).splitlines()
    dense, cut = open_checkpoint(tmp_path / "run"), open_checkpoint(tmp_path / "cut")
    linears = [name for _, name in dense.tensors if name.startswith("blocks.") and "norm" not in name]
    linears = [name.removesuffix(".weight") for name in linears if name.endswith(".weight")]
    assert len(linears) == 14
    lines = dict(line.split(": relative error ") for line in report[:14])
    assert lines.keys() == set(linears)
    for name in linears:
        w = dense.tensor(f"{name}.weight").double()
        down, up = (cut.tensor(f"{name}.{factor}.weight").double() for factor in ("down", "up"))
        values = torch.linalg.svdvals(w)
        lost = float(values[6:].square().sum().sqrt())
        assert float((w - up @ down).norm()) == pytest.approx(lost, rel=1e-6)
        assert float(lines[name]) == pytest.approx(lost / float(w.norm()), abs=6e-5)
        torch.testing.assert_close(up.t() @ up, values[:6].diag(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(down @ down.t(), values[:6].diag(), rtol=1e-5, atol=1e-5)
    assert report[-2].startswith("rank 6: relative error ")
    for _, name in dense.tensors:
        if name.removesuffix(".weight") not in linears:
            assert torch.equal(dense.tensor(name), cut.tensor(name)), name
    import_checkpoint("llama", llama, tmp_path / "again", rank=6)
    assert open_checkpoint(tmp_path / "again").state_hash == cut.state_hash
    export(tmp_path / "cut", tmp_path / "merged", merge=True)  # a cut model is linear, and merges
    with pytest.raises(UserError, match=r"--rank: blocks\.0\.attention\.k has no such rank .*at most 12, got 13"):
        import_checkpoint("llama", llama, tmp_path / "wide", rank=13)


def test_a_whole_rank_loses_nothing_and_ties_are_harmless() -> None:
    w = torch.eye(7, 5, dtype=torch.float64)  # all singular values tied
    down, up, error = factors(w, 5)
    assert error == 0.0
    torch.testing.assert_close(up @ down, w)
    down, up, error = factors(torch.zeros(4, 3), 2)
    assert error == 0.0 and not (up @ down).any()


def golden_directory(golden: Golden, directory: Path, kind: str) -> None:
    """A golden file as the published code would have saved it, in CoLA's or CoLA-M's layout."""
    weights = {name.removeprefix("param."): value for name, value in golden.values.items() if name.startswith("param.")}
    layers = golden.config["num_hidden_layers"]
    if kind == "cola-m":
        weights = {cola_m_name(name, layers): value for name, value in weights.items()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)  # old releases saved it
    directory.mkdir()
    save_file({name: value.contiguous() for name, value in weights.items()}, directory / "model.safetensors")
    content = {**golden.config, "model_type": kind.replace("-", "_")}
    (directory / "config.json").write_text(json.dumps(content))
    small = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    (directory / "tokenizer.json").write_text(json.dumps(small))


def cola_m_name(name: str, layers: int) -> str:
    parts = name.split(".")
    if "cola_" not in name:
        return name
    layer, module, linear, factor = int(parts[2]), parts[3], parts[4].removesuffix("_proj"), parts[5]
    if module == "self_attn" and linear in "qkv":
        place = f"pre_attn.pre_{linear}_proj" if factor == "cola_a" else f"self_attn.post_{linear}_proj"
    elif module == "self_attn":
        place = "self_attn.pre_o_proj" if factor == "cola_a" else "post_attn.post_o_proj"
    elif linear in ("gate", "up"):
        place = f"pre_mlp.pre_{linear}_proj" if factor == "cola_a" else f"self_mlp.post_{linear}_proj"
    elif factor == "cola_a":
        place = "self_mlp.pre_down_proj"
    else:
        place = "post_mlp.post_down_proj"
        if layer + 1 < layers:
            layer, place = layer + 1, "last_layer_post_mlp.post_down_proj"
    return f"model.layers.{layer}.{place}.{factor}"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["cola", "cola-m"])
def test_published_cola_comes_in(kind: Any, file: str, tmp_path: Path) -> None:
    """The published code's weights give its logits (fp32 inside), in fp64; the rank comes from the shapes."""
    golden = Golden(file)
    golden_directory(golden, tmp_path / "hf", kind)
    import_checkpoint(kind, tmp_path / "hf", tmp_path / "in")
    model = boost.load_model(tmp_path / "in")
    assert model.model.rank == golden.values["param.model.layers.0.self_attn.q_proj.cola_a"].shape[1]
    with torch.no_grad():
        assert distance(model(golden.ids), golden.logits) <= 1e-5


def test_loro_comes_in(tmp_path: Path) -> None:
    """LORO's layout: `weight_in` [d_in, r], `weight_out` [d_out, r], a LLaMA otherwise, its rank in no file."""
    run = write_checkpoint(tmp_path / "run", vocab_size=4099, bottleneck_activation="none")
    export(run, tmp_path / "hf")

    def as_loro(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            if name.endswith("proj.down.weight"):
                prefix = name.removesuffix("down.weight")
                weights[f"{prefix}weight_in"] = weights.pop(name).t().contiguous()
                weights[f"{prefix}weight_out"] = weights.pop(f"{prefix}up.weight")

    edit_weights(tmp_path / "hf", as_loro)
    edit_config(tmp_path / "hf", model_type="llama", rank=None)
    import_checkpoint("loro", tmp_path / "hf", tmp_path / "in")
    first, again = open_checkpoint(run), open_checkpoint(tmp_path / "in")
    assert again.state_hash == first.state_hash
    assert saved_config(again).model == saved_config(first).model
    edit_config(tmp_path / "hf", model_type="cola")
    with pytest.raises(UserError, match=r"lacks model\.layers\.0\.self_attn\.q_proj\.cola_a"):
        import_checkpoint("cola", tmp_path / "hf", tmp_path / "other")


def test_an_export_of_another_version_is_refused(tmp_path: Path) -> None:
    export(write_checkpoint(tmp_path / "run", vocab_size=4099), tmp_path / "hf")
    edit_config(tmp_path / "hf", export_format=2)
    with pytest.raises(UserError, match=r"config\.json: export_format is another version's \(expected 1, got 2\)"):
        import_checkpoint("boost", tmp_path / "hf", tmp_path / "in")


def test_an_imported_checkpoint_starts_a_run(llama: Path, tmp_path: Path) -> None:
    """What `run.init_from` loads: every parameter of the model, at any step in the name."""
    import_checkpoint("llama", llama, tmp_path / "step-7", rank=6)
    opened = open_checkpoint(tmp_path / "step-7")
    assert (opened.step, opened.state["optimizer_steps"]) == (7, 0)
    assert boost.load_model(tmp_path / "step-7").model.rank == 6


CONFIG_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "scaled": ({"rope_scaling": {"rope_type": "yarn"}}, r"config\.json: rope_scaling is not supported"),
    "scaled-5": ({"rope_parameters": {"rope_type": "llama3"}}, r"rope_parameters: only the default rotary"),
    "act": ({"hidden_act": "gelu"}, r"hidden_act is not supported \(expected silu or linear, got gelu\)"),
    "act is a list": ({"hidden_act": ["silu"]}, r"hidden_act is not supported"),
    "absurd number": ({"rms_norm_eps": 10**400}, r"rms_norm_eps \(expected a positive number"),
    "type": ({"model_type": "mistral"}, r"another kind of model \(expected model_type llama, got mistral\)"),
    "missing": ({"hidden_size": None}, r"config\.json: has no hidden_size"),
    "text": ({"num_hidden_layers": "2"}, r"num_hidden_layers \(expected a whole number of at least 1, got 2\)"),
    "quantised": ({"quantization_config": {"bits": 4}}, r"quantization_config is not supported"),
    "layers": ({"num_hidden_layers": 3}, r"lacks model\.layers\.2\."),
    "fewer": ({"num_hidden_layers": 1}, r"unknown tensor model\.layers\.1\.\S+ and \d+ more"),
    "width": ({"intermediate_size": 45}, r"mlp\.gate_proj\.weight has another shape \(expected \[45, 32\], got \[44"),
    "tied": ({"tie_word_embeddings": True}, r"lm_head\.weight differs from model\.embed_tokens\.weight"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIG_ERRORS.values(), ids=CONFIG_ERRORS)
def test_what_does_not_fit_is_named(llama: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(llama, **changes)
    with pytest.raises(UserError, match=message) as caught:
        import_checkpoint("llama", llama, tmp_path / "in")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "in").exists()


def _drop(weights: dict[str, Tensor]) -> None:
    del weights["model.norm.weight"]


def _add(weights: dict[str, Tensor]) -> None:
    weights["model.layers.0.self_attn.q_proj.lora_A"] = torch.zeros(1)


def _spoil(weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"][3] = torch.nan


def _quantise(weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"lacks model\.norm\.weight"),
        (_add, r"unknown tensor model\.layers\.0\.self_attn\.q_proj\.lora_A$"),
        (_spoil, r"model\.norm\.weight holds numbers that are not finite"),
        (_quantise, r"model\.norm\.weight: not F64, F32, F16 or BF16 \(got I8\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(llama: Path, tmp_path: Path, change: Any, message: str) -> None:
    edit_weights(llama, change)
    with pytest.raises(UserError, match=message):
        import_checkpoint("llama", llama, tmp_path / "in")


def test_files_that_are_not_read(llama: Path, tmp_path: Path) -> None:
    """Pickles, damaged files, an index that leads out of the directory, and an existing target."""
    with pytest.raises(UserError, match=r"--rank: cuts whole linears"):
        import_checkpoint("cola", llama, tmp_path / "in", rank=3)
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError, match=r"in: exists already"):
        import_checkpoint("llama", llama, tmp_path / "in")
    index = llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}))
    with pytest.raises(UserError, match=r"must be a plain file name"):
        import_checkpoint("llama", llama, tmp_path / "new")
    index.unlink()
    (llama / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(UserError, match=r"model\.safetensors: not a readable safetensors file"):
        import_checkpoint("llama", llama, tmp_path / "new")
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has no model\.safetensors; .*pickles are not read"):
        import_checkpoint("llama", llama, tmp_path / "new")
