"""Perplexity as the published code of GaLore, CoLA, LORO and SLTrain counts it on C4, beside the correct one.

Their `evaluate_model` adds up the mean losses of n batches of sequences and divides by a count of batches that begins
at 1: by n + 1. So their figures are too low, by a factor exp(loss / (n + 1)). Each batch's mean counts alike, however
many tokens it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from boost.data.dataset import Split
from boost.errors import UserError
from boost.inference.evaluate import Evaluation, evaluate, perplexity
from boost.model.decoder import Decoder


@dataclass(frozen=True)
class PapersCount:
    """The mean losses of batches of `batch` sequences (the last may be smaller), in nats per token."""

    losses: Sequence[float]
    batch: int

    @property
    def perplexity(self) -> float:
        """exp(sum of the losses / (n + 1))."""
        return perplexity(sum(self.losses) / (len(self.losses) + 1))

    def __str__(self) -> str:
        n = len(self.losses)
        return (
            f"perplexity_c4_papers {self.perplexity:.2f}: the losses of {n:,} batches of {self.batch} sequences added "
            f"up and divided by {n + 1:,}, as the published code of the C4 papers does"
        )


def evaluate_both(
    model: Decoder, split: Split, start_id: int, sequence_length: int, batch_size: int, papers_batch: int
) -> tuple[Evaluation, PapersCount]:
    """One pass over the split, counted in both ways.

    Args:
        start_id: context of the first token.
        batch_size: sequences per forward pass.
        papers_batch: sequences whose mean loss the published code takes as one: those of a forward pass of one GPU.

    Raises:
        UserError: the split is empty.
    """
    parts: list[Evaluation] = []
    step = papers_batch * sequence_length
    for begin in range(0, len(split), step):
        part = replace(split, tokens=split.tokens[begin : begin + step])
        context = start_id if begin == 0 else int(split.tokens[begin - 1])
        found = evaluate(model, part, context, sequence_length, batch_size)
        assert found is not None, "nothing stops it"
        parts.append(found)
    if not parts:
        raise UserError("data.path", "the validation split is empty")
    tokens = sum(part.tokens for part in parts)
    loss = sum(part.loss * part.tokens for part in parts) / tokens
    # A part's bits are over the bytes of the whole split.
    whole = Evaluation(loss, sum(part.bits_per_byte for part in parts), tokens)
    return whole, PapersCount([part.loss for part in parts], papers_batch)
