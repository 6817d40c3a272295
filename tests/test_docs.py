"""The documents are true: commands run, configurations load, links lead somewhere, no field or option is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

import boost
from boost.cli import app
from boost.config import ModelSection, TrainConfig, preset_names
from boost.config_rules import NOT_AVAILABLE
from boost.model.costs import parameters

ROOT = Path(__file__).parent.parent
MANUAL = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [*MANUAL, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY"))]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

per_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its lines, the line it starts on, and the HTML comment on the line before."""

    language: str
    code: str
    line: int
    comment: str


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    for match in re.finditer(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start(2)) + 1
        yield Block(match[2], match[3], line, match[1] or "")


def manual_blocks(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{document.name}:{block.line}")
        for document in MANUAL
        for block in blocks(document)
        if block.language == language
    ]


def environment() -> dict[str, str]:
    """This interpreter's `boost` first on PATH, one thread per process, and no rank inherited from outside."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**inherited, "PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("document", MANUAL, ids=lambda path: path.name)
def test_commands_run(document: Path, tmp_path: Path) -> None:
    """`bash` and `python` blocks, in order, in one folder; a `text` block marked as output is what came out."""
    printed = None
    for block in blocks(document):
        where = f"{document.name}:{block.line}"
        if block.comment.startswith("not run:"):
            assert block.comment.removeprefix("not run:").strip(), f"{where} does not say why it is not run"
        elif block.language in ("bash", "python"):
            command = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
            done = subprocess.run(
                [*command, block.code],
                cwd=tmp_path,
                env=environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"
            printed = done.stdout
        elif block.comment == "output":
            assert printed == block.code, where


def test_most_commands_are_run() -> None:
    """An exception in every document's commands, or a parser that finds no block, would make the test above empty."""
    shell = [block for document in MANUAL for block in blocks(document) if block.language == "bash"]
    skipped = [block for block in shell if block.comment.startswith("not run:")]
    assert len(shell) >= 10
    assert len(skipped) <= 5
    fences = sum(document.read_text(encoding="utf-8").count("\n```") for document in MANUAL)
    assert fences == 2 * sum(1 for document in MANUAL for _ in blocks(document))


@pytest.mark.parametrize("block", manual_blocks("yaml"))
def test_configurations_load(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(block.code, encoding="utf-8")
    TrainConfig.load(path)


@per_document
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s#]+)", text) if not link.startswith(("http:", "https:"))]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


@per_document
def test_every_document_can_be_reached(document: Path) -> None:
    if document.name != "README.md":
        assert f"({document.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_public_names_can_be_listed() -> None:
    assert dir(boost) == sorted(boost.__all__)
    assert all(getattr(boost, name) for name in boost.__all__)


def fields() -> dict[str, Any]:
    """`section.field` to its part of the schema."""
    return {
        f"{section}.{name}": field
        for section, part in TrainConfig.model_fields.items()
        for name, field in part.annotation.model_fields.items()  # type: ignore[union-attr]
    }


def rows() -> dict[str, list[str]]:
    """`section.field` to the other cells of its row in docs/configuration.md: values, default, meaning."""
    found = re.findall(r"^\| `(\w+\.\w+)` \| (.*) \|$", CONFIGURATION, re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in found}


def test_the_configuration_tables_have_every_field_and_no_other() -> None:
    assert list(rows()) == list(fields())


@pytest.mark.parametrize("name", fields())
def test_a_fields_row_agrees_with_the_schema(name: str) -> None:
    values, default, meaning = rows()[name]
    field = fields()[name]
    if field.is_required():
        assert default == "required"
    elif field.default_factory is not None:
        assert default == "derived"
    else:
        shown = json.dumps(field.default)
        assert default.strip("`") == shown.strip('"')
    assert meaning
    section, _, field_name = name.partition(".")
    annotation: Any = TrainConfig.model_fields[section].annotation
    choices = annotation.model_json_schema()["properties"][field_name].get("enum", [])
    available = NOT_AVAILABLE.get(name, choices)
    for choice in choices:
        assert f"`{choice}`" + ("" if choice in available else "¹") in values.split(", ")
    assert ("¹" in values) == (name in NOT_AVAILABLE)


def test_the_presets_table_agrees_with_the_presets() -> None:
    found = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", CONFIGURATION, re.MULTILINE)
    assert sorted(name for name, _ in found) == [name for name in preset_names() if not RECIPE.fullmatch(name)]
    for name, cells in found:
        config = TrainConfig.load(name)
        model, train = config.model, config.train
        sizes = [model.hidden_size, model.ffn_size, model.layers, model.heads, model.rank or "-"]
        lengths = [train.sequence_length, train.global_batch_size, train.steps]
        assert cells.split(" | ")[1:] == [*map(str, sizes), millions(model), *map(str, lengths)], name


# `paper/METHOD-SIZE`, or its short form.
RECIPE = re.compile(r"(?:paper/(\w+)|cola)-(60m|130m|350m|1b|7b)")


def millions(model: ModelSection) -> str:
    return f"{parameters(model) / 1e6:,.2f} M"


def test_the_recipes_table_agrees_with_the_recipes() -> None:
    """A row for each size; each method in one column of counts, which holds for all methods of it."""
    header = re.search(r"^\| size \| .* \| r \| (.*) \| steps \| of `sltrain` \|$", CONFIGURATION, re.MULTILINE)
    assert header
    columns = [re.findall(r"`(\w+)`", cell) for cell in header[1].split(" | ")]
    found = re.findall(r"^\| (60m|130m|350m|1b|7b) \| (.*) \|$", CONFIGURATION, re.MULTILINE)
    recipes = {f"paper/{method}-{size}" for size, _ in found for column in columns for method in column}
    assert recipes == {name for name in preset_names() if name.startswith("paper/")}
    for size, cells in found:
        *sizes, rank = cells.split(" | ")[:5]
        *counts, steps, steps_of_sltrain = cells.split(" | ")[5:]
        for methods, count in zip(columns, counts, strict=True):
            for method in methods:
                config = TrainConfig.load(f"paper/{method}-{size}")
                model = config.model
                expected = [model.hidden_size, model.ffn_size, model.layers, model.heads]
                assert sizes == [str(number) for number in expected]
                assert count == millions(model)
                if method != "relora":
                    assert config.train.steps == int(steps_of_sltrain if method == "sltrain" else steps)
                    assert model.linear == "dense" or rank == str(model.rank)


def options(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """(command, option) for every option of a command and of those below it."""
    for parameter in command.params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("-"):
                yield name, option
    for below, inner in getattr(command, "commands", {}).items():
        yield from options(inner, f"{name} {below}")


def test_every_option_is_documented() -> None:
    text = "\n".join(document.read_text(encoding="utf-8") for document in MANUAL)
    known = list(options(typer.main.get_command(app), "boost"))
    assert len(known) >= 20
    missing = [(command, option) for command, option in known if not re.search(rf"`[^`\n]*{option}(?![\w-])", text)]
    assert not missing


def test_every_command_is_documented() -> None:
    text = "\n".join(document.read_text(encoding="utf-8") for document in MANUAL)
    commands = {command for command, _ in options(typer.main.get_command(app), "boost") if command != "boost"}
    assert {command for command in commands if not re.search(rf"`?{command}\b", text)} == set()
