"""Perplexity as the C4 papers' code counts it, beside the correct one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from boost.data.dataset import Split
from boost.errors import UserError
from boost.inference.c4_papers import PapersCount, evaluate_both
from boost.inference.evaluate import evaluate
from tests.models import build, model_section


def split_of(length: int, vocabulary: int) -> Split:
    tokens = np.random.default_rng(0).integers(0, vocabulary, length).astype(np.uint16)
    return Split("validation", tokens, np.array([0, length]), 3 * length)


def test_the_count_by_hand() -> None:
    """Losses 2, 3 and 4: their mean is 3, and the papers' code takes (2 + 3 + 4) / 4."""
    count = PapersCount([2.0, 3.0, 4.0], 256)
    assert count.perplexity == pytest.approx(9.487735836358526, rel=1e-14)  # exp(2.25), where exp(3) is 20.09
    assert str(count) == (
        "perplexity_c4_papers 9.49: the losses of 3 batches of 256 sequences added up and divided by 4, "
        "as the published code of the C4 papers does"
    )


@pytest.mark.parametrize(("papers_batch", "sizes"), [(3, [33, 33, 33, 6]), (2, [22, 22, 22, 22, 17]), (256, [105])])
def test_both_counts_from_one_pass(papers_batch: int, sizes: list[int]) -> None:
    """Windows of 11 tokens in batches that the forward passes of 2 do not divide; the last of each is smaller."""
    model = build(model_section()).eval()
    split = split_of(105, model.model.vocab_size)
    correct, papers = evaluate_both(model, split, 7, 11, 2, papers_batch)

    stream = torch.from_numpy(np.concatenate([[7], split.tokens.astype(np.int64)]))
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        for start in range(0, 105, 11):
            window = stream[start : start + 12]
            losses.extend(F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none"))
    means = [float(torch.stack(batch).mean()) for batch in _cut(losses, sizes)]
    assert papers.losses == pytest.approx(means, rel=1e-12)
    assert papers.perplexity == pytest.approx(math.exp(sum(means) / (len(sizes) + 1)), rel=1e-12)
    assert papers.perplexity < correct.perplexity

    alone = evaluate(model, split, 7, 11, 2)
    assert alone is not None
    assert correct.tokens == alone.tokens == 105
    assert correct.loss == pytest.approx(alone.loss, rel=1e-12)
    assert correct.bits_per_byte == pytest.approx(alone.bits_per_byte, rel=1e-12)


def _cut(losses: list[torch.Tensor], sizes: list[int]) -> list[list[torch.Tensor]]:
    assert sum(sizes) == len(losses)
    ends = np.cumsum(sizes)
    return [losses[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def test_an_empty_split_is_a_mistake() -> None:
    model = build(model_section()).eval()
    with pytest.raises(UserError, match="the validation split is empty"):
        evaluate_both(model, split_of(0, 50), 7, 11, 2, 3)
