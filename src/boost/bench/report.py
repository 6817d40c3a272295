"""A bench's result as a Markdown table and as a bar chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def markdown(result: dict[str, Any]) -> str:
    """The table; times relative to the first dense and the first vanilla row of the same run."""
    rows = result["rows"]
    baselines = {
        "dense": next((r for r in reversed(rows) if r["layout"] == "dense" and "overlap" in str(r["options"])), None),
        "vanilla": next((r for r in rows if r["layout"] == "vanilla"), None),
    }
    rate = result["link_bytes_per_second"]
    link = "no limit (loopback)" if rate is None else f"{rate / 1e6:.0f} MB/s per rank and direction"
    if result["link"] == "replay":
        link = f"REPLAYED: one rank's CPU time, collectives on a modelled serial link of {link}"
    model, train = result["config"]["model"], result["config"]["train"]
    lines = [
        f"tp {result['config']['parallel']['tp']}, hidden {model['hidden_size']}, {model['layers']} layers, "
        f"rank {model['rank']}, sequence {train['sequence_length']}, batch {train['micro_batch_size']}, "
        f"{train['precision']}; link: {link}.",
        "",
        "| variant | step (s) | tokens/s | over dense | over vanilla | waiting (s) | forward | backward | repeated "
        "| kept (B) | peak (MB) |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row["name"],
            f"{row['step_seconds']:.3f} ± {row['step_seconds_spread']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
            *(_ratio(baselines[name], row) for name in ("dense", "vanilla")),
            f"{row['comm_wait_seconds']:.3f}",
            f"{row['forward_collectives']} / {row['forward_elements']:,.0f}",
            f"{row['backward_collectives']} / {row['backward_elements']:,.0f}",
            str(row["recompute_collectives"]),
            f"{row['saved_bytes_per_token']:,.0f}",
            f"{row['peak_memory_bytes'] / 1e6:,.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Ratios are over dense with its own overlap and over vanilla in pairs. Forward and backward: collectives per "
        "block / elements per token, counted on the wire (a reduce-scatter or all-gather counts half); repeated: "
        "collectives per block that recomputation adds; kept: bytes per token and block from forward to backward.",
    ]
    return "\n".join(lines) + "\n"


def _ratio(baseline: dict[str, Any] | None, row: dict[str, Any]) -> str:
    return "" if baseline is None else f"{baseline['step_seconds'] / row['step_seconds']:.2f}x"


def bar_chart(result: dict[str, Any], path: Path) -> None:
    """Step time of every variant, the part spent waiting in collectives in another colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(reversed(result["rows"]))
    figure, axes = pyplot.subplots(figsize=(8, 0.35 * len(rows) + 1), layout="constrained")
    names = [row["name"] for row in rows]
    waits = [row["comm_wait_seconds"] for row in rows]
    axes.barh(names, [row["step_seconds"] - wait for row, wait in zip(rows, waits, strict=True)], label="computing")
    axes.barh(names, waits, left=[r["step_seconds"] - w for r, w in zip(rows, waits, strict=True)], label="waiting")
    axes.set_xlabel("seconds per step")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
