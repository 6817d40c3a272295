"""Tasks of lm-eval (EleutherAI's language model evaluation harness) on a model of ours, in this process.

Imports lm-eval, so it is imported only where tasks are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
from tokenizers import Tokenizer
from tqdm import tqdm

from boost.data.tokenizer import special_ids
from boost.errors import UserError
from boost.inference.evaluate import first_context
from boost.inference.generate import generate
from boost.model.decoder import Decoder

BOOTSTRAPS = 1000  # resamplings behind a standard error that has no formula


def run_tasks(
    model: Decoder,
    tokenizer: Tokenizer,
    names: Sequence[str],
    *,
    sequence_length: int,
    batch_size: int,
    include_path: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict[str, Any]:
    """Runs tasks and returns lm-eval's results; `results[NAME]["acc,none"]` is a number of them.

    Args:
        names: lm-eval's own tasks and groups, those in `include_path`, or YAML files.
        sequence_length: the most tokens that the model reads at once.
        batch_size: sequences per forward pass.
        include_path: a folder with further tasks.
        limit: the first so many documents of each task.
        num_fewshot: solved examples before each question; default as the task has it.

    Raises:
        UserError: there is no such task or folder, or the task does not fit into `sequence_length`.
    """
    if include_path is not None and not include_path.is_dir():
        raise UserError("--include-path", f"{include_path} is no folder")
    manager = TaskManager(include_path=include_path)
    known = set(manager.all_tasks)
    for name in names:
        if name not in known and not Path(name).is_file():
            raise UserError("--tasks", f"no task {name}", hint="`lm-eval ls tasks` lists lm-eval's own")
    adapter = Adapter(model, tokenizer, sequence_length, batch_size)
    return simple_evaluate(
        adapter,
        tasks=list(names),
        task_manager=manager,
        limit=limit,
        num_fewshot=num_fewshot,
        bootstrap_iters=BOOTSTRAPS,
        log_samples=False,
    )


def table(results: dict[str, Any]) -> str:
    """Results as Markdown."""
    columns = [column for column in ("results", "groups") if results.get(column)]
    return "\n".join(make_table(results, column) for column in columns)


class Adapter(TemplateLM):
    """A decoder and its tokenizer as lm-eval calls a model.

    No special token is added to a text. What has no context gets the end-of-document token, or the tokenizer's begin
    token if it has no other: as validation has it. The base class cuts a context and its continuation into tokens.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, max_length: int, batch_size: int) -> None:
        super().__init__()
        tokenizer.encode_special_tokens = True  # "</s>" in a text is text, as where data is prepared
        self.model, self.text_tokenizer = model, tokenizer
        self.max_length, self.batch_size = max_length, batch_size
        special = special_ids(tokenizer)
        self.start_id, self.end_id = first_context(special.bos, special.eos), special.eos
        self._device = next(model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self.start_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.text_tokenizer.encode(string, add_special_tokens=False).ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        return self.score([(context, continuation) for _, context, continuation in requests], disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of `max_length` that predict each token once.

        A text's last window is filled from the front with tokens already predicted, as lm-eval asks for.
        """
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(self.tok_encode(text), self.start_id, self.max_length, 1)
            ]
            for (text,) in (request.args for request in requests)
        ]
        scores = iter(self.score([pair for text in windows for pair in text], disable_tqdm))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Text after each context, up to the first stop string, the end token or `max_gen_toks`."""
        texts = []
        for seed, request in enumerate(tqdm(requests, disable=disable_tqdm, desc="generating")):
            context, options = request.args
            texts.append(self.generated(context, options, seed))
        return texts

    def generated(self, context: str, options: dict[str, Any], seed: int) -> str:
        options = dict(normalize_gen_kwargs(options))
        room = self.max_length - options["max_gen_toks"]
        if room < 1:
            raise UserError(
                "--sequence-length",
                "leaves no room for a prompt before what the task generates",
                expected=f"more than {options['max_gen_toks']}",
                got=self.max_length,
            )
        stops = [stop for stop in options["until"] if stop]
        text, ids = "", list[int]()
        for token in generate(
            self.model,
            self.tok_encode(context)[-room:] or [self.start_id],
            options["max_gen_toks"],
            temperature=options.get("temperature", 1.0) if options["do_sample"] else 0.0,
            top_k=options.get("top_k", 0),
            top_p=options.get("top_p", 1.0),
            seed=seed,
            stop_id=self.end_id,
        ):
            ids.append(token)
            text = self.text_tokenizer.decode(ids)
            if any(stop in text for stop in stops):
                break
        for stop in stops:
            text = text.split(stop)[0]
        return text

    @torch.no_grad()
    def score(
        self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """For each context and continuation: the log-probability in nats, and whether it is the most likely one.

        A context is cut at its beginning to what fits before the continuation.
        """
        inputs: list[list[int]] = []
        for context, continuation in pairs:
            if len(continuation) > self.max_length:
                raise UserError(
                    "--sequence-length",
                    "the task has a longer continuation",
                    expected=f"at least {len(continuation)}",
                    got=self.max_length,
                )
            # A context of spaces alone lends them to the continuation, and is empty then.
            inputs.append(((context or [self.start_id]) + continuation)[-self.max_length - 1 : -1])
        scores = [(0.0, True)] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda i: -len(inputs[i]))  # little padding, and the largest first
        for first in tqdm(range(0, len(order), self.batch_size), disable=disable_tqdm, desc="scoring"):
            chosen = order[first : first + self.batch_size]
            ids = torch.zeros(len(chosen), len(inputs[chosen[0]]), dtype=torch.int64)
            for row, i in zip(ids, chosen, strict=True):
                row[: len(inputs[i])] = torch.tensor(inputs[i])
            # Padding stands on the right, where no earlier token sees it.
            logits_BSV = self.model(ids.to(self._device))
            for logits_SV, i in zip(logits_BSV, chosen, strict=True):
                end, targets = len(inputs[i]), torch.tensor(pairs[i][1], dtype=torch.int64, device=self._device)
                wide = logits_SV[end - len(targets) : end].to(torch.promote_types(logits_SV.dtype, torch.float32))
                nats = wide.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).double().sum()
                scores[i] = float(nats), bool((wide.argmax(-1) == targets).all())
        return scores
