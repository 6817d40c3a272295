"""Sampling text, one token at a time, with a key/value cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from boost.model.context import KeyValueCache
from boost.model.decoder import Decoder
from boost.parallel.zero import release


@torch.no_grad()
def generate(
    model: Decoder,
    prompt_ids: list[int],
    max_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    stop_id: int | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yields sampled token ids until `max_tokens`, or until `stop_id`, which is not yielded.

    Args:
        prompt_ids: at least one token.
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with this probability.
        seed: equal seeds give equal text.
        use_cache: False runs the whole sequence for each token: the same text, slower.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    cache = KeyValueCache() if use_cache else None
    ids = list(prompt_ids)
    fresh = ids
    try:
        for _ in range(max_tokens):
            logits = model(torch.tensor([fresh], device=device), cache=cache)[0, -1]
            token = pick(logits.float().cpu(), temperature, top_k, top_p, generator)
            if token == stop_id:
                return
            yield token
            ids.append(token)
            fresh = [token] if use_cache else ids
    finally:
        release(model)


def pick(logits_V: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """One token id from logits [V]."""
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities, order = (logits_V / temperature).softmax(-1).sort(descending=True)
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    if top_k:
        kept[top_k:] = False
    # A token is kept while the probability before it is below top_p; the first always.
    kept &= probabilities.cumsum(-1) - probabilities < top_p
    kept[0] = True
    choice = torch.multinomial(probabilities.masked_fill(~kept, 0), 1, generator=generator)
    return int(order[choice])
