"""`boost bench layouts`: the files that users get, counts beside their formulas, and links that clean up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.bench import layouts, link, report
from boost.bench.link import LinkError, limited_links
from boost.bench.variants import BASELINES, RECOMPUTING_BASELINES, chosen, layout_variants
from boost.config import TrainConfig
from boost.errors import UserError
from tests.bench.tiny import TINY, tiny_config, tiny_overrides

TP = 2
TOKENS = TINY["train.global_batch_size"] * TINY["train.sequence_length"]
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
    "forward_bytes",
    "backward_bytes",
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
        assert row["tokens_per_second"] == pytest.approx(TOKENS / row["step_seconds"])
        assert row["saved_bytes_per_token"] > 0
        assert row["peak_memory_bytes"] > 0


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("dense", (2, 2 * D), (2, 2 * D)),
        ("dense, overlap", (2, 2 * D), (2, 2 * D)),
        ("dense, sequence parallel", (4, 2 * D), (8, 3 * D + 2 * D / TOKENS)),
        ("dense, sequence parallel, overlap", (4, 2 * D), (8, 3 * D + 2 * D / TOKENS)),
        ("vanilla, A grouped", (7, 5 * D + 2 * F), (4, 3 * D + F)),
        ("vanilla, pairs", (7, 5 * D + 2 * F), (7, 6 * D + F)),
        ("vanilla, grouped", (4, 5 * D + 2 * F), (4, 3 * D + F)),
        ("vanilla, sharded heads", (5, 4 * D + 2 * F), (5, 4 * D + F)),
        ("BTP", (4, 7 * R + STATISTIC), (4, 7 * R)),
        ("BTP, overlap weight gradients", (4, 7 * R + STATISTIC), (4, 7 * R)),
        ("BTP, overlap split batch", (8, 7 * R + STATISTIC), (8, 7 * R)),
        ("BTP, sync norm", (6, 7 * R + 2), (6, 7 * R + 2)),
        ("BTP, recompute latents", (4, 7 * R + STATISTIC), (4, 7 * R)),
        ("BTP, fp32 bridges", (4, 7 * R + 2), (4, 7 * R)),
        ("BTP, sequence-sharded bottleneck", (8, 7 * R + STATISTIC / 2), (8, 7 * R + 2)),
    ],
)
def test_counts_are_the_formulas(
    rows: dict[str, dict[str, Any]], name: str, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    row = rows[name]
    assert (row["forward_collectives"], row["forward_elements"]) == forward
    assert (row["backward_collectives"], row["backward_elements"]) == backward


def test_bytes_are_those_of_the_wire(rows: dict[str, dict[str, Any]]) -> None:
    """bf16, fp32, and int8 with a scale per group of values and an fp32 norm, each sent twice as half an all-reduce."""
    assert rows["BTP"]["forward_bytes"] == 2 * (7 * R + STATISTIC)
    assert rows["BTP, fp32 bridges"]["forward_bytes"] == 4 * (7 * R + 2)
    for name in ("BTP, int8 bridges (lossy)", "BTP, fp8 bridges (lossy)"):
        assert rows[name]["backward_bytes"] == 7 * R + 4 * 4
        assert rows[name]["forward_bytes"] == 7 * R + 4 * 4 + 4 * 2
    assert rows["dense, sequence parallel"]["forward_bytes"] == rows["dense"]["forward_bytes"] == 2 * 2 * D


def test_sequence_parallelism_keeps_a_share(rows: dict[str, dict[str, Any]]) -> None:
    """Plain Megatron keeps the inputs and results of both norms whole on every rank."""
    whole, share = (rows[name]["saved_bytes_per_token"] for name in ("dense", "dense, sequence parallel"))
    assert whole - share == pytest.approx(2 * 4 * D * (1 - 1 / TP) + 4 * 2 * (1 - 1 / TP), abs=1)


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
    assert "link: no limit." in table
    measured, keeping, recomputing, costs = tables(table)
    assert [line[0] for line in measured[1:]] == [row["name"] for row in result["rows"]]
    modes = {row["name"]: row["options"].get("train.recompute", "none") for row in result["rows"]}
    for ratios, baselines in ((keeping, BASELINES), (recomputing, RECOMPUTING_BASELINES)):
        # The mode of recomputation is named on both sides.
        assert set(ratios[0][2:]) == {f"over {name} (recompute {modes[name]})" for name in baselines}
        assert all(line[1] == modes[line[0]] for line in ratios[1:])
    assert [line[0] for line in keeping[1:]] == [name for name, mode in modes.items() if mode == "none"]
    assert [line[0] for line in recomputing[1:]] == [name for name, mode in modes.items() if mode != "none"]
    assert [line[0] for line in costs[1:]] == [line[0] for line in recomputing[1:]]
    seconds = {row["name"]: row["step_seconds"] for row in result["rows"]}
    btp = dict(zip(keeping[0], next(line for line in keeping if line[0] == "BTP"), strict=True))
    assert btp["over vanilla, pairs (recompute none)"] == f"{seconds['vanilla, pairs'] / seconds['BTP']:.2f}x"
    assert chart.read_bytes().startswith(b"\x89PNG")


def tables(text: str) -> list[list[list[str]]]:
    """The Markdown tables of a text, row by row without the ruler; rows of a table are equally long."""
    found = []
    for paragraph in text.split("\n\n"):
        lines = [line for line in paragraph.strip().splitlines() if line.startswith("|")]
        if lines:
            cells = [line.strip("| ").split(" | ") for line in (lines[0], *lines[2:])]
            assert len({len(line) for line in cells}) == 1
            found.append(cells)
    return found


def test_variants_are_chosen_by_name_or_pattern() -> None:
    variants = layout_variants()
    assert len({variant.name for variant in variants}) == len(variants)
    assert {*BASELINES, *RECOMPUTING_BASELINES} <= {variant.name for variant in variants}
    assert [v.name for v in chosen(variants, ["BTP", "dense, overlap"])] == ["dense, overlap", "BTP"]
    assert {v.layout for v in chosen(variants, ["vanilla*"])} == {"vanilla", "vanilla_sharded_heads"}
    assert chosen(variants, []) == variants
    with pytest.raises(UserError, match=r"--only: matches no variant .*got Dense"):
        chosen(variants, ["BTP", "Dense"])


def test_few_variants_need_few_tables(run: tuple[dict[str, Any], str, Path]) -> None:
    """Without a baseline there are no ratios, and without its plain twin a recomputing one has no cost."""
    rows = {row["name"]: row for row in run[0]["rows"]}
    twins = [rows["BTP"], rows["BTP, recompute blocks"]]
    assert len(tables(report.markdown(run[0] | {"rows": twins}))) == 2
    assert len(tables(report.markdown(run[0] | {"rows": twins[1:]}))) == 1


@pytest.mark.parametrize("link", ["auto", "1e6"])
def test_gpus_have_their_own_links(monkeypatch: pytest.MonkeyPatch, link: str) -> None:
    monkeypatch.setattr(layouts, "choose_device", lambda device: torch.device("cuda", 0))
    if link == "auto":
        assert layouts._rate(tiny_config(tp=TP), link) is None
    else:
        with pytest.raises(UserError, match="links of GPUs"):
            layouts._rate(tiny_config(tp=TP), link)


@pytest.mark.parametrize("rate", ["fast", "0", "-1e6", "nan", "inf"])
def test_unknown_link_is_refused(rate: str) -> None:
    with pytest.raises(UserError, match="bytes per second, auto, none or replay"):
        layouts.bench_layouts(tiny_config(tp=TP), link=rate)


@pytest.mark.parametrize("linear", ["dense", "sltrain", "relora"])
def test_only_low_rank_models_have_layouts_to_compare(linear: str) -> None:
    changes = [f"model.linear={linear}", *(["model.rank=null"] if linear == "dense" else [])]
    config = TrainConfig.load("bench-1024", [*tiny_overrides(tp=TP), *changes])
    with pytest.raises(UserError) as refused:
        layouts.bench_layouts(config, link="none", rounds=1)
    assert str(refused.value) == f"model.linear: has no layouts to compare (expected low_rank, got {linear})"
    assert refused.value.exit_code == 2


# --- Links ---


def namespaces(process: int | None = None) -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(f"boost{process or os.getpid()}-")}


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


def test_a_token_bucket_where_links_are_not_possible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It says so in one line, in the result, in the table; and no step is faster than its bytes allow."""
    rate = 4e5
    monkeypatch.setattr(shutil, "which", lambda name: None)
    variants = chosen(layout_variants(), ["dense, sequence parallel", "BTP", "BTP, overlap split batch"])
    result = layouts.bench_layouts(tiny_config(tp=TP), link=str(rate), rounds=1, variants=variants)
    warned = capsys.readouterr().err.splitlines()
    assert len(warned) == 1
    assert "token bucket, because ip is not installed (package iproute2)" in warned[0]
    assert result["link"] == "token bucket, because ip is not installed (package iproute2)"
    assert result["link_bytes_per_second"] == rate
    assert "link: TOKEN BUCKET, because ip is not installed" in report.markdown(result)
    report.bar_chart(result, tmp_path / "chart.png")
    for row in result["rows"]:
        bytes_per_token = row["forward_bytes"] + row["backward_bytes"]
        least = bytes_per_token * TOKENS * 2 * (TP - 1) / TP / rate
        assert row["step_seconds"] > max(row["comm_wait_seconds"], least) > 0.01
        # Halves that take turns compute while bytes are on their way.
        assert row["comm_wait_seconds"] > (0 if "split batch" in row["name"] else least)


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


KEEP = """
import signal
import time
from boost.bench.link import limited_links
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without
with limited_links(2, 1e6):
    print("made", flush=True)
    time.sleep(60)
"""


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_signals_leave_no_namespaces(number: signal.Signals) -> None:
    """What a killed process could not remove, the next one does."""
    process = subprocess.Popen([sys.executable, "-c", KEEP], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"made\n"
    assert len(namespaces(process.pid)) == 3
    process.send_signal(number)
    assert process.wait(30) != 0
    process.stdout.close()
    if number == signal.SIGKILL:
        assert len(namespaces(process.pid)) == 3
        with limited_links(2, 1e6):
            pass
    assert not namespaces(process.pid)


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
