"""`boost bench layouts`: the files that users get, counts beside their formulas, and links that clean up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from boost.bench import layouts, link
from boost.bench.link import LinkError, limited_links
from boost.bench.variants import layout_variants
from boost.config import TrainConfig
from boost.errors import EnvironmentFailure, UserError
from tests.bench.tiny import TINY, tiny_config, tiny_overrides

TP = 2
D, F, R = TINY["model.hidden_size"], TINY["model.ffn_size"], TINY["model.rank"]
# Two norms, each with a high and a low part per rank.
STATISTIC = 2 * 2 * TP
FIELDS = {
    "name",
    "layout",
    "options",
    "step_seconds",
    "step_seconds_spread",
    "tokens_per_second",
    "comm_wait_seconds",
    "forward_collectives",
    "forward_elements",
    "backward_collectives",
    "backward_elements",
    "recompute_collectives",
    "saved_bytes_per_token",
    "peak_memory_bytes",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The JSON, the printed table and the chart of one run of the command."""
    directory = tmp_path_factory.mktemp("bench")
    file, chart = directory / "layouts.json", directory / "layouts.png"
    command = [sys.executable, "-m", "boost", "bench", "layouts", "bench-1024", *tiny_overrides(tp=TP)]
    command += ["--link", "none", "--rounds", "2", "--json", str(file), "--chart", str(chart)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout, chart


@pytest.fixture(scope="module")
def rows(run: tuple[dict[str, Any], str, Path]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in run[0]["rows"]}


def test_json_is_the_contracts(run: tuple[dict[str, Any], str, Path]) -> None:
    result = run[0]
    assert {"machine", "config", "link_bytes_per_second", "rows"} <= result.keys()
    assert result["link_bytes_per_second"] is None
    assert TrainConfig.from_dict(result["config"]).parallel.tp == TP
    for row, variant in zip(result["rows"], layout_variants(), strict=True):
        assert row.keys() == FIELDS
        assert (row["name"], row["layout"], row["options"]) == (variant.name, variant.layout, variant.options)
        assert row["step_seconds"] > row["comm_wait_seconds"] > 0
        tokens = TINY["train.global_batch_size"] * TINY["train.sequence_length"]
        assert row["tokens_per_second"] == pytest.approx(tokens / row["step_seconds"])
        assert row["saved_bytes_per_token"] > 0
        assert row["peak_memory_bytes"] > 0


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("dense", (2, 2 * D), (2, 2 * D)),
        ("dense, overlap", (2, 2 * D), (2, 2 * D)),
        ("vanilla, pairs", (7, 5 * D + 2 * F), (7, 6 * D + F)),
        ("vanilla, grouped", (4, 5 * D + 2 * F), (4, 3 * D + F)),
        ("vanilla, sharded heads", (5, 4 * D + 2 * F), (5, 4 * D + F)),
        ("BTP", (4, 7 * R + STATISTIC), (4, 7 * R)),
        ("BTP, overlap weight gradients", (4, 7 * R + STATISTIC), (4, 7 * R)),
        ("BTP, overlap split batch", (8, 7 * R + STATISTIC), (8, 7 * R)),
        ("BTP, sync norm", (6, 7 * R + 2), (6, 7 * R + 2)),
        ("BTP, recompute latents", (4, 7 * R + STATISTIC), (4, 7 * R)),
    ],
)
def test_counts_are_the_formulas(
    rows: dict[str, dict[str, Any]], name: str, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    row = rows[name]
    assert (row["forward_collectives"], row["forward_elements"]) == forward
    assert (row["backward_collectives"], row["backward_elements"]) == backward


def test_only_latent_recomputation_of_btp_repeats_no_collective(rows: dict[str, dict[str, Any]]) -> None:
    repeated = {name: row["recompute_collectives"] for name, row in rows.items() if "recompute" in name}
    free = {name for name, count in repeated.items() if count == 0}
    assert free == {"BTP, recompute latents", "BTP, recompute latents, overlap weight gradients"}
    assert all(row["recompute_collectives"] == 0 for name, row in rows.items() if name not in repeated)


def test_latent_recomputation_keeps_what_it_may(rows: dict[str, dict[str, Any]]) -> None:
    """Per token and block 7 r + 2 d / tp elements of bf16 and a few fp32 scalars."""
    kept = rows["BTP, recompute latents"]["saved_bytes_per_token"]
    assert kept <= 2 * (7 * R + 2 * D / TP) + 4 * 6
    assert kept < rows["BTP"]["saved_bytes_per_token"]


def test_table_and_chart(run: tuple[dict[str, Any], str, Path]) -> None:
    result, table, chart = run
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(result["rows"])
    assert len({line.count("|") for line in lines}) == 1
    assert "no limit (loopback)" in table
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rate", ["fast", "0", "-1e6", "nan", "inf"])
def test_unknown_link_is_refused(rate: str) -> None:
    with pytest.raises(UserError, match="bytes per second, auto, none or replay"):
        layouts.bench_layouts(tiny_config(tp=TP), link=rate)


# --- Links ---


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(f"boost{os.getpid()}")}


@pytest.mark.parametrize("tool", ["ip", "tc"])
def test_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else f"/sbin/{name}")
    with pytest.raises(LinkError, match=f"{tool} is not installed"), limited_links(2, 1e6):
        pass


def test_links_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LinkError, match="root"), limited_links(2, 1e6):
        pass


def test_the_command_refuses_where_links_are_not_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentFailure, match="iproute2"):
        layouts.bench_layouts(tiny_config(tp=TP), link="1e6")


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="network namespaces need root and iproute2",
)


@needs_root
@pytest.mark.parametrize("end", [None, RuntimeError, KeyboardInterrupt])
def test_namespaces_are_removed_at_any_end(end: type[BaseException] | None) -> None:

    def use() -> None:
        with limited_links(2, 1e6) as cluster:
            assert namespaces() > set(cluster.names)
            if end is not None:
                raise end

    if end is None:
        use()
    else:
        with pytest.raises(end):
            use()
    assert not namespaces()


@needs_root
def test_namespaces_are_removed_when_making_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespaces already exist when tc, the last step, refuses."""
    plain = link._run

    def run(*command: str) -> None:
        plain(*command[:-1], "nonsense") if command[0] == "tc" else plain(*command)

    monkeypatch.setattr(link, "_run", run)
    with pytest.raises(LinkError, match=r"^tc .*nonsense"), limited_links(2, 1e6):
        pass
    assert not namespaces()


@needs_root
def test_a_limited_run_says_its_rate() -> None:
    """Over a link of 4 MB/s; nothing is left behind."""
    variants = [v for v in layout_variants() if v.name in ("dense", "BTP")]
    result = layouts.bench_layouts(tiny_config(tp=TP), link="4e6", rounds=1, variants=variants)
    assert result["link_bytes_per_second"] == 4e6
    assert [row["name"] for row in result["rows"]] == ["dense", "BTP"]
    assert not namespaces()
