"""The variants that `boost bench layouts` compares: layouts, and BTP with each optimisation on alone and off alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from boost.config import TrainConfig


@dataclass(frozen=True)
class Variant:
    """A name for the table and what differs from the given configuration, by section and field."""

    name: str
    layout: str
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, base: TrainConfig) -> TrainConfig:
        """The base configuration with this variant's layout and options; a dense one has no rank."""
        content = base.model_dump(mode="json")
        content["parallel"] |= {"tensor_layout": "btp", "norm": "online", "group_linears": True, "overlap": "none"}
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
    latent, block = {"train.recompute": "latent"}, {"train.recompute": "block"}
    variants = [
        Variant("dense", "dense"),
        Variant("dense, overlap", "dense", late),
        Variant("vanilla, pairs", "vanilla", alone),
        Variant("vanilla, grouped", "vanilla"),
        Variant("vanilla, grouped, overlap", "vanilla", late),
        Variant("vanilla, sharded heads", "vanilla_sharded_heads"),
        Variant("BTP", "btp"),
        Variant("BTP, ungrouped", "btp", alone),
        Variant("BTP, sync norm", "btp", sync),
        Variant("BTP, ungrouped, sync norm", "btp", alone | sync),
        Variant("BTP, overlap weight gradients", "btp", late),
        Variant("BTP, overlap split batch", "btp", split),
    ]
    if recompute:
        variants += [
            Variant("dense, recompute blocks", "dense", block),
            Variant("vanilla, recompute blocks", "vanilla", block),
            Variant("vanilla, recompute latents", "vanilla", latent),
            Variant("BTP, recompute blocks", "btp", block),
            Variant("BTP, recompute latents", "btp", latent),
            Variant("BTP, recompute latents, overlap weight gradients", "btp", latent | late),
        ]
    return variants
