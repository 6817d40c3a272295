"""lm-eval's tasks, offline: the numbers of `boost eval --data`, of hand computations and of lm-eval's own adapter."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from tokenizers import Tokenizer

import boost
from boost.cli import app
from boost.data.dataset import Dataset
from boost.data.prepare import prepare
from boost.data.tokenizer import special_ids
from boost.errors import UserError
from boost.inference.evaluate import context_token, evaluate
from boost.inference.generate import generate
from boost.inference.load import tokenizer_from
from boost.interop.huggingface import export
from tests.interop.checkpoints import write_checkpoint

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")

from boost.checkpoint.store import open_checkpoint
from boost.inference import tasks
from boost.inference.tasks import Adapter, run_tasks

WORDS = "the of and to in a that is was he for it with as his on be at by I this had not are but from or have an they"
TEXT = " ".join(WORDS.split()[(7 * i + i * i // 5) % 30] for i in range(120)) + " é 丘\n"
QUESTIONS = [
    {"question": "Fellow citizens of the", "choices": ["Senate", "House of Representatives"], "answer": 0},
    {"question": "The Treasury is", "choices": ["in a fiscal year", "large", "of war"], "answer": 2},
    {"question": "A treaty with ", "choices": ["Spain", "Great Britain"], "answer": 1},
    {"question": "Peace", "choices": ["was made", "is not to be had", "."], "answer": 0},
]
STARTS = ["The Senate and", "Peace"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model's checkpoint in `run`, and three local tasks with their data in `tasks`."""
    root = tmp_path_factory.mktemp("tasks")
    write_checkpoint(root / "run", dtype=torch.float64, vocab_size=4099)
    (known,) = greedy_texts(root, STARTS[:1])
    folder = root / "tasks"
    folder.mkdir()
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    metrics = [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}]
    _task(folder, "whole_text", [{"text": TEXT}], metric_list=metrics, **rolling)
    _task(folder, "two_texts", [{"text": TEXT}, {"text": TEXT[:100]}], metric_list=metrics, **rolling)
    _task(folder, "choices", QUESTIONS, output_type="multiple_choice", doc_to_text="{{question}}",
          doc_to_choice="choices", doc_to_target="answer",
          metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}])  # fmt: skip
    targets = [{"text": STARTS[0], "target": known}, {"text": STARTS[1], "target": "another"}]
    _task(folder, "texts_on", targets, output_type="generate_until",
          doc_to_text="{{text}}", doc_to_target="{{target}}", generation_kwargs={"until": ["\n"], "max_gen_toks": 9},
          metric_list=[{"metric": "exact_match"}])  # fmt: skip
    return root


def _task(folder: Path, name: str, documents: list[dict[str, Any]], **fields: Any) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    described = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 1},
        **fields,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(described))


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched, caches stay in the test's folder, and lm-eval's own thousands of tasks are not indexed."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def run(root: Path) -> Callable[..., dict[str, Any]]:
    """Runs tasks and gives their metrics."""

    def run(*names: str, sequence_length: int = 64, batch_size: int = 3, **options: Any) -> dict[str, Any]:
        model, tokenizer = boost.load_model(root / "run"), tokenizer_of(root)
        found = run_tasks(
            model,
            tokenizer,
            names,
            sequence_length=sequence_length,
            batch_size=batch_size,
            include_path=root / "tasks",
            **options,
        )
        return found["results"]

    return run


def tokenizer_of(root: Path) -> Tokenizer:
    return tokenizer_from(open_checkpoint(root / "run"))


def greedy_texts(root: Path, starts: list[str]) -> list[str]:
    """The likeliest nine tokens after each start, up to the end of the line."""
    model, tokenizer = boost.load_model(root / "run"), tokenizer_of(root)
    prompts = [tokenizer.encode(start, add_special_tokens=False).ids for start in starts]
    return [tokenizer.decode(list(generate(model, ids, 9, temperature=0))).split("\n")[0] for ids in prompts]


def test_bits_per_byte_are_those_of_eval_on_the_same_text(
    root: Path, tmp_path: Path, run: Callable[..., dict[str, Any]]
) -> None:
    """Where windows fall alike: they fill the text to its end, or hold all of it."""
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "other"}) + "\n" + json.dumps({"text": TEXT}) + "\n")
    prepare([str(tmp_path / "text.jsonl")], tmp_path / "data", "bpe4096", validation_last=1, eos=False)
    dataset = Dataset.open(tmp_path / "data")
    assert dataset.validation is not None
    length = len(dataset.validation)
    filling = next(size for size in range(8, length) if length % size == 0)
    assert length // filling > 2
    for size in (filling, length, length + 5):
        ours = evaluate(boost.load_model(root / "run"), dataset.validation, context_token(dataset), size, 2)
        assert ours is not None and ours.tokens == length
        theirs = run("whole_text", sequence_length=size)["whole_text"]
        assert theirs["bits_per_byte,none"] == pytest.approx(ours.bits_per_byte, rel=1e-12)
        assert theirs["byte_perplexity,none"] == pytest.approx(2**ours.bits_per_byte, rel=1e-12)


def log_likelihood(root: Path, context: list[int], continuation: list[int]) -> float:
    """One sequence at a time, from whole logits."""
    ids = torch.tensor(context + continuation)
    with torch.no_grad():
        logits = boost.load_model(root / "run")(ids[None, :-1])[0]
    return -float(F.cross_entropy(logits[-len(continuation) :], ids[-len(continuation) :], reduction="sum"))


def test_the_last_window_of_a_text_has_context(root: Path, run: Callable[..., dict[str, Any]]) -> None:
    """Two texts, each cut for itself, whose ends fill no window: the last is filled with tokens before it."""
    tokenizer, size, nats, texts = tokenizer_of(root), 15, 0.0, [TEXT, TEXT[:100]]
    for text in texts:
        ids = [special_ids(tokenizer).eos or 0, *tokenizer.encode(text, add_special_tokens=False).ids]
        count = len(ids) - 1
        assert count % size
        for start in range(0, count, size):
            end = min(start + size, count)
            nats -= log_likelihood(root, ids[max(0, end - size) : start + 1], ids[start + 1 : end + 1])
    found = run("two_texts", sequence_length=size)["two_texts"]
    expected = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    assert found["bits_per_byte,none"] == pytest.approx(expected, rel=1e-12)


def test_multiple_choice_by_hand(root: Path, run: Callable[..., dict[str, Any]]) -> None:
    """acc takes the likeliest choice, acc_norm the likeliest per character; a context's last space goes with it."""
    tokenizer = tokenizer_of(root)
    right, right_norm = [], []
    for document in QUESTIONS:
        context = document["question"].rstrip()
        spaces = document["question"][len(context) :] + " "
        before = tokenizer.encode(context, add_special_tokens=False).ids
        scores = []
        for choice in document["choices"]:
            whole = tokenizer.encode(context + spaces + choice, add_special_tokens=False).ids
            assert whole[: len(before)] == before
            scores.append(log_likelihood(root, before, whole[len(before) :]))
        per_character = [s / len(choice) for s, choice in zip(scores, document["choices"], strict=True)]
        right.append(scores.index(max(scores)) == document["answer"])
        right_norm.append(per_character.index(max(per_character)) == document["answer"])
    assert 0 < sum(right) < len(right) or 0 < sum(right_norm) < len(right_norm), "all or none proves little"
    for batch_size in (1, 5):
        found = run("choices", batch_size=batch_size)["choices"]
        assert found["acc,none"] == sum(right) / len(right)
        assert found["acc_norm,none"] == sum(right_norm) / len(right_norm)
    assert run("choices", limit=1)["choices"]["acc,none"] == right[0]


def test_scores(root: Path) -> None:
    """Batches of unequal lengths, a context too long, none at all, and whether a continuation is the likeliest."""
    model, tokenizer = boost.load_model(root / "run"), tokenizer_of(root)
    adapter = Adapter(model, tokenizer, 8, 2)
    long = list(range(40, 60))
    one, two = generate(model, [5, 6], 2, temperature=0)
    pairs = [([5, 6], [7]), (long, [1, 2]), ([], [9, 8, 7]), ([3], [4] * 8)]
    pairs += [([5, 6], [one]), ([5, 6], [one, two]), ([5, 6], [one, two + 1]), ([5, 6], [one + 1, two])]
    expected = [([5, 6], [7]), (long[-7:], [1, 2]), ([adapter.start_id], [9, 8, 7]), ([3], [4] * 8)]
    scores = adapter.score(pairs, disable_tqdm=True)
    for (score, _), (context, continuation) in zip(scores, expected, strict=False):
        assert score == pytest.approx(log_likelihood(root, context, continuation), rel=1e-12)
    assert [greedy for _, greedy in scores] == [False] * 4 + [True, True, False, False]
    with pytest.raises(UserError, match=r"--sequence-length: .*longer continuation \(expected at least 9, got 8\)"):
        adapter.score([([1], [2] * 9)])


def test_generation(root: Path, run: Callable[..., dict[str, Any]]) -> None:
    """What `generate` gives, up to a stop string or the limit; the prompt is cut at its beginning."""
    model, tokenizer = boost.load_model(root / "run"), tokenizer_of(root)
    adapter = Adapter(model, tokenizer, 12, 2)
    prompt = "The Senate and the House of Representatives are in session, and the treaty is made"
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    assert len(ids) > 4
    text = tokenizer.decode(list(generate(model, ids[-4:], 8, temperature=0)))
    assert adapter.generated(prompt, {"until": [], "max_gen_toks": 8}, 0) == text
    stop = text[len(text) // 2 :][:3]
    assert adapter.generated(prompt, {"until": ["never", stop], "max_gen_toks": 8}, 0) == text.split(stop)[0]
    sampled = {adapter.generated(prompt, {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8}, s) for s in (0, 1)}
    assert len(sampled) == 2
    with pytest.raises(UserError, match=r"--sequence-length: leaves no room.*expected more than 12, got 12"):
        adapter.generated(prompt, {"max_gen_toks": 12}, 0)
    assert run("texts_on")["texts_on"]["exact_match,none"] == 0.5


def test_transformers_and_lm_evals_own_adapter_agree(
    root: Path, tmp_path: Path, run: Callable[..., dict[str, Any]]
) -> None:
    """The exported directory through lm-eval's Hugging Face adapter, in windows that do not fill the text."""
    pytest.importorskip("accelerate", reason="lm-eval's Hugging Face adapter needs it")
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(root / "run", tmp_path / "out")
    adapter = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        tokenizer=AutoTokenizer.from_pretrained(tmp_path / "out"),
        max_length=48,
        batch_size=2,
        prefix_token_id=special_ids(tokenizer_of(root)).eos,  # it would take the begin token
    )
    names = ["two_texts", "choices"]
    theirs = simple_evaluate(
        adapter,
        tasks=names,
        task_manager=TaskManager(include_path=root / "tasks", include_defaults=False),
        bootstrap_iters=0,
    )
    assert theirs is not None
    ours = run(*names, sequence_length=48)
    for task, metric in (("two_texts", "bits_per_byte"), ("choices", "acc"), ("choices", "acc_norm")):
        assert ours[task][f"{metric},none"] == pytest.approx(theirs["results"][task][f"{metric},none"], rel=1e-6)

    texts = greedy_texts(root, STARTS)
    stops = [["\n"], ["\n", texts[1][len(texts[1]) // 2 :][:3]]]
    requests = [
        Instance("generate_until", {}, (start, {"until": until, "max_gen_toks": 9}), number)
        for number, (start, until) in enumerate(zip(STARTS, stops, strict=True))
    ]
    own = Adapter(boost.load_model(root / "run"), tokenizer_of(root), 48, 2).generate_until(requests)
    assert own == adapter.generate_until(requests) == [texts[0], texts[1].split(stops[1][1])[0]]


def test_the_command(root: Path, capsys: pytest.CaptureFixture[str], run: Callable[..., dict[str, Any]]) -> None:
    local = ["--tasks", "whole_text,choices", "--include-path", str(root / "tasks"), "--sequence-length", "16"]
    app(["eval", str(root / "run"), *local], standalone_mode=False)
    printed = capsys.readouterr().out
    expected = run("whole_text", sequence_length=16)["whole_text"]["bits_per_byte,none"]
    (line,) = (line for line in printed.splitlines() if "bits_per_byte" in line)
    assert f"{expected:.4f}" in line
    assert "acc_norm" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"boost eval: needs --data or --tasks, one of them"),
        (["--tasks", "choices", "--data", "d"], r"boost eval: needs --data or --tasks, one of them"),
        (["--data", "d", "--limit", "3"], r"boost eval: --include-path, --limit and --num-fewshot go with --tasks"),
        (["--tasks", "choices", "--papers-batches", "3"], r"boost eval: --papers-batches goes with --data"),
        (["--tasks", "chices", "--include-path", "{tasks}"], r"--tasks: no task chices; `lm-eval ls tasks` lists"),
        (["--tasks", "choices", "--include-path", "{tasks}/none"], r"--include-path: \S+none is no folder"),
    ],
)
def test_mistakes_are_one_line(root: Path, arguments: list[str], message: str) -> None:
    filled = [argument.format(tasks=root / "tasks") for argument in arguments]
    with pytest.raises(UserError, match=message):
        app(["eval", str(root / "run"), *filled], standalone_mode=False)


def test_a_missing_extra_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"--tasks: this needs the package lm_eval: .*pip install 'boost-llm\[eval\]'"):
        app(["eval", str(root / "run"), "--tasks", "choices"], standalone_mode=False)
