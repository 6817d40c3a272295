"""What SLTrain (`model.linear: sltrain`) goes with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from boost.config_loader import Violation

if TYPE_CHECKING:
    from boost.config import TrainConfig


def sltrain_rules(config: TrainConfig) -> Iterator[Violation]:
    """SLTrain is built for plain BTP; its supports must have entries, and blocks that nothing cuts."""
    model, parallel = config.model, config.parallel
    if model.linear != "sltrain":
        return
    refused: dict[str, tuple[str, str, bool]] = {
        "parallel.tensor_layout": (
            "btp",
            "splits the rank, and the input of sparse parts is split otherwise",
            config.layout != "btp",
        ),
        "parallel.bridge_dtype": ("compute", "is not for the bridges of sltrain", parallel.bridge_dtype != "compute"),
        "parallel.sequence_sharded_bottleneck": (
            "false",
            "keeps latents sharded over tokens, which sltrain's norm for its sparse part is not",
            parallel.sequence_sharded_bottleneck,
        ),
        "parallel.overlap": (
            "none or weight_grads",
            "takes turns at bridges alone, and sltrain's sparse parts need more than those",
            parallel.overlap == "split_batch",
        ),
        "train.compile": ("false", "does not compile sltrain blocks", config.train.compile),
        "train.recompute": (
            "none or block",
            "keeps latents alone, from which sparse parts cannot be computed again",
            config.train.recompute == "latent",
        ),
    }
    for field, (expected, reason, broken) in refused.items():
        if broken:
            section, _, name = field.partition(".")
            got = getattr(getattr(config, section), name)
            yield Violation((field, "model.linear"), reason, expected=expected, got=str(got).lower())
    widths = {
        "model.hidden_size": model.hidden_size,
        "model.ffn_size": model.ffn_size,
        "model.heads x model.head_size": model.heads * model.head_size,
        "model.kv_heads x model.head_size": model.kv_heads * model.head_size,
    }
    smallest = model.hidden_size * min(widths.values())
    if model.sparse_density * smallest < 1:
        yield Violation(
            ("model.sparse_density", *_names(widths)),
            f"gives the smallest linear, of {smallest} entries, none",
            expected=f"at least {1 / smallest:.3g}",
            got=model.sparse_density,
        )
    if model.sparse_support != "block_diagonal":
        return
    blocks = model.sparse_blocks
    for field, width in widths.items():
        if width % blocks:
            yield Violation(
                ("model.sparse_blocks", *_names([field])),
                f"does not divide {field} = {width} into equal blocks",
                expected=f"a divisor of {math.gcd(*widths.values())}",
                got=blocks,
            )
            return
    if blocks % parallel.tp:
        yield Violation(
            ("model.sparse_blocks", "parallel.tp"),
            f"cannot be shared out over parallel.tp = {parallel.tp} ranks without cutting a block",
            expected=f"a multiple of {parallel.tp}",
            got=blocks,
        )
    if model.sparse_density * blocks > 1:
        yield Violation(
            ("model.sparse_density", "model.sparse_blocks"),
            f"is more than {blocks} blocks on the diagonal have, 1 / {blocks} of all entries",
            expected=f"at most {1 / blocks:.4g}",
            got=model.sparse_density,
        )


def _names(widths: Iterable[str]) -> list[str]:
    """The fields that widths are products of, each once."""
    return list(dict.fromkeys(field for width in widths for field in width.split(" x ")))
