"""Loading, generating and evaluating."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import boost
from boost.checkpoint.store import open_checkpoint
from boost.cli import app
from boost.data.dataset import Dataset, Split
from boost.data.prepare import prepare
from boost.errors import UserError
from boost.inference.evaluate import Evaluation, context_token, evaluate
from boost.inference.generate import generate, pick
from boost.inference.load import model_from, model_on
from boost.model.context import KeyValueCache
from boost.parallel.mesh import Mesh
from tests.distributed.harness import run_ranks
from tests.interop.checkpoints import write_checkpoint
from tests.models import build, distance, model_section, perturbed, tensors, tokens
from tests.training.conftest import dataset, settings, with_changes  # noqa: F401 - fixtures
from tests.training.runs import metrics, run


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_cached_logits_equal_whole_ones(kv_heads: int) -> None:
    model = build(model_section(kv_heads=kv_heads)).eval()
    ids, _ = tokens(model.model, batch=2, sequence=9)
    whole = model(ids)
    cache = KeyValueCache()
    pieces = [model(ids[:, :4], cache=cache)]
    pieces += [model(ids[:, i : i + 1], cache=cache) for i in range(4, 9)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-10, atol=1e-12)
    assert cache.length == 9
    with pytest.raises(ValueError, match="one token at a time"):
        model(ids[:, :2], cache=cache)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_with_cache_equals_generation_without(temperature: float) -> None:
    model = build(model_section()).eval()
    texts = [
        list(generate(model, [3, 1, 4], 20, temperature=temperature, top_k=0, seed=5, use_cache=use_cache))
        for use_cache in (True, False)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 20
    other = list(generate(model, [3, 1, 4], 20, temperature=temperature, top_k=0, seed=6))
    assert (other == texts[0]) == (temperature == 0)


def test_generation_stops() -> None:
    model = build(model_section()).eval()
    text = list(generate(model, [1], 30, temperature=1.0, seed=1))
    stop = text[7]
    assert list(generate(model, [1], 30, temperature=1.0, seed=1, stop_id=stop)) == text[: text.index(stop)]


def test_sampling_keeps_what_it_should() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0])
    generator = torch.Generator().manual_seed(0)

    def seen(**options: Any) -> set[int]:
        defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options
        return {pick(logits, generator=generator, **defaults) for _ in range(400)}

    assert seen() == {0, 1, 2, 3, 4}
    assert seen(top_k=2) == {1, 2}
    assert seen(top_p=0.5) == {1}
    assert seen(top_p=0.8) == {1, 2}
    assert seen(temperature=0.0) == {1}


def test_loading_gives_the_trained_model(settings: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    """From a padded tp = 2 checkpoint: the validation loss of the run, and its logits' cross-entropy."""
    config = with_changes(settings, parallel__tp=2, train__validate_every=6, model__ffn_size=43, model__vocab_size=4097)
    run(config)
    model = boost.load_model(config.run.dir)
    opened = Dataset.open(settings["data"]["path"])
    assert opened.validation is not None
    result = evaluate(model, opened.validation, context_token(opened), 16, 5)
    assert result.loss == pytest.approx(metrics(config)[-1]["val_loss"], rel=1e-12)
    assert result.perplexity == math.exp(result.loss)

    assert opened.eos_id is not None
    stream = np.concatenate([[opened.eos_id], opened.validation.tokens.astype(np.int64)])
    total = 0.0
    for start in range(0, len(stream) - 1, 16):
        window = torch.from_numpy(stream[start : start + 17])
        logits = model(window[:-1].unsqueeze(0))
        assert logits.shape == (1, len(window) - 1, 4097)
        total += F.cross_entropy(logits[0], window[1:], reduction="sum").item()
    assert result.tokens == len(stream) - 1
    assert result.loss == pytest.approx(total / result.tokens, rel=1e-10)
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / opened.validation.bytes, rel=1e-10)

    half = boost.load_model(config.run.dir, dtype=torch.bfloat16)
    assert half(torch.tensor([[1, 2, 3]])).dtype == torch.bfloat16


def test_activations_may_be_narrower_than_weights(tmp_path: Path) -> None:
    """As in training with bf16: what the commands do on a GPU."""
    opened = open_checkpoint(write_checkpoint(tmp_path))
    exact, narrow = model_from(opened), model_from(opened, activations=torch.bfloat16)
    assert {value.dtype for value in narrow.parameters()} == {torch.float32}
    ids = torch.tensor([[1, 2, 3]])
    assert narrow(ids).dtype == torch.bfloat16
    assert 0 < distance(narrow(ids).detach().float(), exact(ids).detach()) < 0.05


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_evaluation_follows_the_model_to_a_gpu(tmp_path: Path) -> None:
    opened = open_checkpoint(write_checkpoint(tmp_path, dtype=torch.float64))
    split = Split("validation", np.arange(40, dtype=np.uint16), np.array([0, 40]), 99)
    ours, theirs = (evaluate(model_on(opened, device), split, 7, 11, 2) for device in ("cpu", "cuda"))
    assert ours is not None and theirs is not None
    assert theirs.loss == pytest.approx(ours.loss, rel=1e-2)  # activations in bf16


def test_perplexity_as_the_c4_papers_count_it() -> None:
    """Losses 2, 3 and 4 have the mean 3, and their code takes (2 + 3 + 4) / 4; LORO's log has 3.20223 at 130m."""
    assert Evaluation(3.0, 1.0, 9).papers_perplexity(3) == pytest.approx(9.487735836358526, rel=1e-14)  # exp(2.25)
    loro = Evaluation(3.2178505, 1.0, 9)  # 3.20223 * 206 / 205
    assert round(loro.perplexity, 2) == 24.97
    assert round(loro.papers_perplexity(205), 2) == 24.59


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their count is printed where it is asked for, the correct one always; a missing GPU is named."""
    write_checkpoint(tmp_path / "run", vocab_size=4099)
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n{"text": "The Senate and the House"}\n')
    prepare([str(tmp_path / "texts.jsonl")], tmp_path / "data", "bpe4096", validation_last=1)
    command = ["eval", str(tmp_path / "run"), "--data", str(tmp_path / "data"), "--device"]
    app([*command, "cpu"], standalone_mode=False)
    correct = capsys.readouterr().out
    loss = float(correct.split(",")[0].removeprefix("loss "))
    app([*command, "cpu", "--papers-batches", "3"], standalone_mode=False)
    first, second = capsys.readouterr().out.splitlines()
    assert first + "\n" == correct
    name, value, how = second.split(" ", 2)
    assert name == "perplexity_c4_papers"
    assert float(value[:-1]) == pytest.approx(math.exp(loss * 3 / 4), rel=1e-4)
    assert how == "exp(loss * 3 / 4), as the C4 papers' code counts it"
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"--device: no CUDA device is visible"):
            app([*command, "cuda"], standalone_mode=False)


def test_loading_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        boost.load_model(tmp_path)


def _logits(mesh: Mesh) -> torch.Tensor:
    from boost.config import ParallelSection

    model = build(model_section(vocab_size=51), ParallelSection(tp=mesh.tp.size), mesh.tp).eval()
    return model(tokens(model.model)[0]).detach()


def test_logits_on_every_rank() -> None:
    """[batch, sequence, vocab] without padding, whatever tp is."""
    whole = _logits(Mesh())
    assert whole.shape == (3, 11, 51)
    for logits in run_ranks(2, _logits):
        torch.testing.assert_close(logits, whole, rtol=1e-10, atol=1e-12)


def test_gains_matter_in_these_tests() -> None:
    weights = tensors(build(model_section()))
    assert all((perturbed(weights)[name] != value).any() for name, value in weights.items() if value.dim() == 1)
