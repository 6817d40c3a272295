"""Loss, perplexity and bits per byte of a model over every token of a held-out split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from boost.data.dataset import Dataset, Split
from boost.data.sampler import IGNORE, validation_sequence, validation_sequences
from boost.errors import UserError
from boost.model.decoder import Decoder
from boost.model.stages import PipelinedDecoder
from boost.parallel.collectives import all_reduce
from boost.parallel.mesh import Group
from boost.parallel.zero import release


@dataclass(frozen=True)
class Evaluation:
    """Over `tokens` predictions: `loss` in nats per token, and `bits_per_byte` of the text they stand for."""

    loss: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)

    def papers_perplexity(self, batches: int) -> float:
        """exp(loss * n / (n + 1)), n batches: as the published code of GaLore, CoLA, LORO and SLTrain counts it on C4.

        Their `evaluate_model` adds up the mean losses of n batches and divides by a count that begins at 1.
        """
        return perplexity(self.loss * batches / (batches + 1))

    def record(self, step: int) -> dict[str, Any]:
        """The fields that a validation adds to the metrics; `val_step` is the number of steps taken before it."""
        return {"val_loss": self.loss, "val_bits_per_byte": self.bits_per_byte, "val_step": step}

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, {self.bits_per_byte:.4f} bits per byte "
            f"over {self.tokens:,} tokens"
        )


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def context_token(dataset: Dataset) -> int:
    """The token that stands before the first of a split."""
    return first_context(dataset.bos_id, dataset.eos_id)


def first_context(bos: int | None, eos: int | None) -> int:
    """What the first token of a text is predicted from: end of document, else begin, else id 0."""
    return next((token for token in (eos, bos) if token is not None), 0)


@torch.no_grad()
def evaluate(
    model: Decoder | PipelinedDecoder,
    split: Split,
    start_id: int,
    sequence_length: int,
    batch_size: int,
    dp: Group | None = None,
    device: torch.device | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Predicts every token of the split exactly once, in windows of `sequence_length`.

    Args:
        start_id: context of the first token.
        batch_size: sequences per forward pass.
        dp: ranks that share the work; all run the same number of passes.
        device: where tokens go; default: where the parameters are.
        stop: asked before every pass; where it says so, to all ranks at once, there is no result.

    Raises:
        UserError: the split is empty.
    """
    dp, device = dp or Group(), device or next(model.parameters()).device
    count = validation_sequences(split, sequence_length)
    if count == 0:
        raise UserError("data.path", "the validation split is empty")
    empty = (np.zeros(sequence_length, np.int64), np.full(sequence_length, IGNORE, np.int64))
    per_rank = -(-count // dp.size)
    mine = range(dp.rank * per_rank, (dp.rank + 1) * per_rank)
    training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    stopped = False
    for first in range(0, per_rank, batch_size):
        if stopped := stop():
            break
        windows = [
            validation_sequence(split, sequence_length, start_id, index) if index < count else empty
            for index in mine[first : first + batch_size]
        ]
        inputs, labels = (torch.from_numpy(np.stack(side)).to(device) for side in zip(*windows, strict=True))
        totals[0] += model.loss(inputs, labels)
        totals[1] += (labels != IGNORE).sum()
    release(model)
    model.train(training)
    if stopped:
        return None
    nats, tokens = all_reduce(totals, dp).tolist()
    return Evaluation(nats / tokens, nats / math.log(2) / split.bytes, int(tokens))
