"""The variants that `boost bench layouts` compares: layouts, and BTP with each optimisation on alone and off alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from boost.config import TrainConfig
from boost.errors import UserError

# What every variant starts from, whatever the given configuration says.
PLAIN = {
    "tensor_layout": "btp",
    "norm": "online",
    "group_linears": True,
    "group_b": True,
    "sequence_parallel": False,
    "overlap": "none",
    "bridge_dtype": "compute",
    "sequence_sharded_bottleneck": False,
}
# What the others are compared with: variants that keep everything, and variants that recompute.
BASELINES = ("dense, overlap", "dense, sequence parallel, overlap", "vanilla, pairs", "vanilla, A grouped")
RECOMPUTING_BASELINES = ("dense, recompute blocks", "vanilla, recompute blocks", "vanilla, recompute latents")


@dataclass(frozen=True)
class Variant:
    """A name for the table and what differs from the given configuration, by section and field."""

    name: str
    layout: str
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, base: TrainConfig) -> TrainConfig:
        """The base configuration with this variant's layout and options; a dense one has no rank."""
        content = base.model_dump(mode="json")
        content["parallel"] |= PLAIN
        content["train"]["recompute"] = "none"
        if self.layout == "dense":
            content["model"] |= {"linear": "dense", "rank": None}
        else:
            content["parallel"]["tensor_layout"] = self.layout
        for name, value in self.options.items():
            section, key = name.split(".")
            content[section][key] = value
        return TrainConfig.from_dict(content)


def layout_variants(*, recompute: bool = True) -> list[Variant]:
    """Layouts first, then BTP's options, then (with `recompute`) what recomputation costs each layout."""
    late, split = {"parallel.overlap": "weight_grads"}, {"parallel.overlap": "split_batch"}
    alone, sync = {"parallel.group_linears": False}, {"parallel.norm": "sync"}
    tokens, few_bytes = {"parallel.sequence_parallel": True}, {"parallel.bridge_dtype": "int8"}
    narrow = {"parallel.sequence_sharded_bottleneck": True}
    latent, block = {"train.recompute": "latent"}, {"train.recompute": "block"}
    variants = [
        Variant("dense", "dense"),
        Variant("dense, overlap", "dense", late),
        Variant("dense, sequence parallel", "dense", tokens),
        Variant("dense, sequence parallel, overlap", "dense", tokens | late),
        Variant("vanilla, pairs", "vanilla", alone),
        Variant("vanilla, A grouped", "vanilla", {"parallel.group_b": False}),
        Variant("vanilla, grouped", "vanilla"),
        Variant("vanilla, grouped, overlap", "vanilla", late),
        Variant("vanilla, sharded heads", "vanilla_sharded_heads"),
        Variant("BTP", "btp"),
        Variant("BTP, ungrouped", "btp", alone),
        Variant("BTP, sync norm", "btp", sync),
        Variant("BTP, ungrouped, sync norm", "btp", alone | sync),
        Variant("BTP, overlap weight gradients", "btp", late),
        Variant("BTP, overlap split batch", "btp", split),
        Variant("BTP, fp32 bridges", "btp", {"parallel.bridge_dtype": "fp32"}),
        Variant("BTP, int8 bridges (lossy)", "btp", few_bytes),
        Variant("BTP, int8 bridges (lossy), overlap weight gradients", "btp", few_bytes | late),
        Variant("BTP, fp8 bridges (lossy)", "btp", {"parallel.bridge_dtype": "fp8"}),
        Variant("BTP, sequence-sharded bottleneck", "btp", narrow),
    ]
    if recompute:
        variants += [
            Variant("dense, recompute blocks", "dense", block),
            Variant("dense, sequence parallel, recompute blocks", "dense", tokens | block),
            Variant("vanilla, recompute blocks", "vanilla", block),
            Variant("vanilla, recompute latents", "vanilla", latent),
            Variant("BTP, recompute blocks", "btp", block),
            Variant("BTP, recompute latents", "btp", latent),
            Variant("BTP, recompute latents, overlap weight gradients", "btp", latent | late),
            Variant("BTP, sequence-sharded bottleneck, recompute latents", "btp", narrow | latent),
        ]
    return variants


def chosen(variants: Sequence[Variant], patterns: Sequence[str]) -> list[Variant]:
    """The variants whose names match any of the patterns (`*` matches anything), in their order; no pattern: all.

    Raises:
        UserError: a pattern that matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(variant.name, pattern) for variant in variants):
            names = ", ".join(f'"{variant.name}"' for variant in variants)
            raise UserError("--only", "matches no variant", expected=f"* or one of {names}", got=pattern)
    return [v for v in variants if not patterns or any(fnmatchcase(v.name, pattern) for pattern in patterns)]
