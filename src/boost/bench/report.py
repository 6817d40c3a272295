"""A bench's result as Markdown tables and as a bar chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boost.bench.variants import BASELINES, RECOMPUTING_BASELINES

Row = dict[str, Any]
NOTE = (
    "Median ± half the distance between the quartiles. Forward and backward: collectives / elements / bytes per block, "
    "the last two per token, counted on the wire (what is not an all-reduce counts half); repeated: collectives per "
    "block that recomputation adds; kept: bytes per token and block from forward to backward; peak: of one rank."
)


def markdown(result: dict[str, Any]) -> str:
    """What was measured, the ratios between variants of one run, and what recomputation costs and saves."""
    rows = result["rows"]
    model, train = result["config"]["model"], result["config"]["train"]
    lines = [
        f"tp {result['config']['parallel']['tp']}, hidden {model['hidden_size']}, {model['layers']} layers, "
        f"rank {model['rank']}, sequence {train['sequence_length']}, batch {train['micro_batch_size']}, "
        f"{train['precision']}; link: {link_text(result)}.",
        "",
        *_table([_measured(row) for row in rows]),
        "",
        NOTE,
    ]
    for keeping, baselines in ((True, BASELINES), (False, RECOMPUTING_BASELINES)):
        sides = [row for row in rows if (recompute(row) == "none") == keeping]
        against = [row for row in sides if row["name"] in baselines]
        if against and len(sides) > 1:
            lines += ["", *_table([_ratios(row, against) for row in sides])]
    recomputed = [_recomputation(row, rows) for row in rows]
    if any(recomputed):
        lines += ["", *_table([cells for cells in recomputed if cells])]
    return "\n".join(lines) + "\n"


def link_text(result: dict[str, Any]) -> str:
    """What joined the ranks; what is not a real link is said in capitals."""
    kind, rate = result["link"], result["link_bytes_per_second"]
    if rate is None:
        return "no limit"
    speed = f"{rate / 1e6:.0f} MB/s per rank and direction"
    if kind == "replay":
        return f"REPLAYED: one rank's CPU time, collectives on a modelled serial link of {speed}"
    if kind.startswith("token bucket"):
        return (
            f"{kind.replace('token bucket', 'TOKEN BUCKET', 1)}: loopback, slowed to a modelled serial link of {speed}"
        )
    return speed


def recompute(row: Row) -> str:
    """A row's mode of recomputation."""
    return str(row["options"].get("train.recompute", "none"))


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Rows of the same columns."""
    header = list(rows[0])
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row.values()) + " |" for row in rows),
    ]


def _measured(row: Row) -> dict[str, str]:
    traffic = {
        way: f"{row[f'{way}_collectives']} / {row[f'{way}_elements']:,.0f} / {row[f'{way}_bytes']:,.0f}"
        for way in ("forward", "backward")
    }
    return {
        "variant": row["name"],
        "recompute": recompute(row),
        "step (s)": f"{row['step_seconds']:.3f} ± {row['step_seconds_spread']:.3f}",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "waiting (s)": f"{row['comm_wait_seconds']:.3f}",
        **traffic,
        "repeated": str(row["recompute_collectives"]),
        "kept (B)": f"{row['saved_bytes_per_token']:,.0f}",
        "peak (MB)": f"{row['peak_memory_bytes'] / 1e6:,.0f}",
    }


def _ratios(row: Row, baselines: Sequence[Row]) -> dict[str, str]:
    """How many times as fast as each baseline."""
    over = {
        f"over {base['name']} (recompute {recompute(base)})": f"{base['step_seconds'] / row['step_seconds']:.2f}x"
        for base in baselines
    }
    return {"speed of": row["name"], "recompute": recompute(row), **over}


def _recomputation(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """Beside the same variant that keeps everything; nothing where that was not run, or is the row itself."""
    options = {name: value for name, value in row["options"].items() if name != "train.recompute"}
    plain = next((r for r in rows if r["layout"] == row["layout"] and r["options"] == options), row)
    if plain is row:
        return {}
    extra = (row["step_seconds"] - plain["step_seconds"]) * 1e3
    saved = (plain["peak_memory_bytes"] - row["peak_memory_bytes"]) / 1e6
    return {
        "recomputing": row["name"],
        "recompute": recompute(row),
        "beside (recompute none)": plain["name"],
        "extra (ms)": f"{extra:.1f}",
        "kept (B)": f"{plain['saved_bytes_per_token']:,.0f} to {row['saved_bytes_per_token']:,.0f}",
        "peak saved (MB)": f"{saved:z,.1f}",
        "peak saved per extra ms (MB)": f"{saved / extra:z.2f}" if extra > 0 else "no cost",
    }


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
    figure.suptitle(f"link: {link_text(result)}", fontsize="small", wrap=True)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
