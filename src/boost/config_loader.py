"""From YAML files and `section.field=value` overrides to a checked configuration, with every problem named at once.

The schema lives in `boost.config`; this file knows how it is read: safe YAML, `extends`, where each value came from,
and how a problem is put into one line.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from boost.config_violations import RulesBroken, Violation
from boost.errors import UserError

PRESETS = Path(__file__).parent / "configs"
PAPER = "paper"  # the folder in it that holds presets too
COMMAND_LINE = "command line"
COUNT_MAX = 2**31 - 1  # every count in the schema stays below this, so that no check on it takes long

_MAX_BYTES = 1_000_000
_MAX_DEPTH = 16
_MAX_ENTRIES = 10_000
_MOST_SHOWN = 50  # problems in one line

Model = TypeVar("Model", bound=BaseModel)


class ConfigError(UserError):
    """The configuration cannot be used; `problems` has one line for each thing that is wrong with it.

    `str(error)` is those lines, the first 50 of them, joined by " | ": it stays a single line whatever their number.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = [" ".join(problem.split()) for problem in problems]
        Exception.__init__(self, self.problems)  # the argument again, so that pickling works

    def __str__(self) -> str:
        more = [f"and {len(self.problems) - _MOST_SHOWN} more"] if len(self.problems) > _MOST_SHOWN else []
        return " | ".join(self.problems[:_MOST_SHOWN] + more)


class Layer(NamedTuple):
    """One source of values: a file of an `extends` chain, or the command line."""

    source: str
    content: Mapping[Any, Any]


class Value(NamedTuple):
    """A value and the source that set it."""

    value: Any
    source: str


def _line(where: str, what: str, *, expected: object = None, got: object = None, hint: str = "") -> str:
    """One problem in the form that every user error has."""
    return str(UserError(where, what, expected=expected, got=got, hint=hint))


# YAML

# Numbers as in YAML 1.2: `6e-3` is a float (YAML 1.1 makes it text), `010` is no octal and `12:30` no sexagesimal.
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,17})$")
_FLOAT = re.compile(
    r"""[-+]?(?: [0-9][0-9_]*\.[0-9]*(?:[eE][-+]?[0-9]+)?
               | \.[0-9]+(?:[eE][-+]?[0-9]+)?
               | [0-9][0-9_]*[eE][-+]?[0-9]+
               | \.(?:inf|Inf|INF))$
        | \.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
_BOOL = re.compile(r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$")
_NULL = re.compile(r"(?:~|null|Null|NULL|)$")


class _Loader(yaml.SafeLoader):
    """Safe YAML without dates and merge keys, and with duplicate keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key.start_mark)
            if key.value in first:
                problem = f"key {_show(key.value)} is given twice, first on line {first[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            first[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Safe YAML that puts quotes around text which `_Loader` would take for a number."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("yYnNtTfFoO"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""])
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


class _NotYaml(Exception):
    """`position` ("3:7", or "") and what is wrong there."""

    def __init__(self, position: str, what: str) -> None:
        super().__init__(what)
        self.position = position
        self.what = what


def _parse(text: str) -> Any:
    """YAML text as plain Python values.

    The events are looked at first: nesting is then bounded before anything recursive runs, and aliases, which can
    expand to any size, and tags never reach the constructor.
    """
    depth = entries = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            entries += 1
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            position = _position(event.start_mark)
            if depth > _MAX_DEPTH:
                raise _NotYaml(position, f"is nested too deeply (expected at most {_MAX_DEPTH} levels)")
            if entries > _MAX_ENTRIES:
                raise _NotYaml(position, f"has too many entries (expected at most {_MAX_ENTRIES})")
            if isinstance(event, yaml.AliasEvent):
                raise _NotYaml(position, "YAML aliases are not supported; use `extends` to share settings")
            if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
                raise _NotYaml(position, "YAML tags are not supported; write the plain value")
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        hint = "; indent with spaces, not tabs" if "\\t" in str(error.problem) else ""
        where = _position(mark) if mark else ""
        raise _NotYaml(where, f"is not valid YAML: {error.problem or error.context}{hint}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        position = f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        raise _NotYaml(position, f"is not valid YAML: character {chr(error.character)!a} is not allowed") from None


def _position(mark: Any) -> str:
    return f"{mark.line + 1}:{mark.column + 1}"


def dump_yaml(content: Mapping[str, Any]) -> str:
    """Plain values as YAML that `_parse` reads back equal."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


# Files and `extends`


def preset_names() -> list[str]:
    """The names of the shipped presets, in alphabetical order; those of published recipes begin with `paper/`."""
    files = [*PRESETS.glob("*.yaml"), *PRESETS.glob(f"{PAPER}/*.yaml")]
    return sorted(path.relative_to(PRESETS).with_suffix("").as_posix() for path in files)


def read_layers(path: str | Path) -> list[Layer]:
    """Reads a file or a preset and all that it extends, the most general first.

    Raises:
        ConfigError: a file is missing or unreadable, is not a YAML mapping, or extends itself.
    """
    layers: list[Layer] = []
    chain: dict[Path, str] = {}
    referrer = ""
    file, label = _locate(str(path), None, referrer)
    while True:
        identity = _identity(file)
        if identity in chain:
            cycle = " -> ".join([*list(chain.values())[list(chain).index(identity) :], label])
            raise ConfigError([_line(f"{layers[-1].source}: extends", f"goes round in a circle: {cycle}")])
        chain[identity] = label
        content = _read_mapping(file, referrer + label)
        parent = content.pop("extends", None)
        for key, value in content.items():
            # Else every field that the other file would set is missing as well.
            if isinstance(value, str) and difflib.get_close_matches(str(key), ["extends"], 1, 0.8):
                raise ConfigError([_line(f"{label}: {_name(key)}", "unknown section", hint="did you mean extends?")])
        layers.append(Layer(label, content))
        if parent is None:
            return layers[::-1]
        if not isinstance(parent, str) or not parent:
            expected = "one file or preset name"
            raise ConfigError([_line(f"{label}: extends", "is not a name", expected=expected, got=_show(parent))])
        referrer = f"{label}: extends: "
        file, label = _locate(parent, file.parent, referrer)


def _locate(name: str, base: Path | None, referrer: str) -> tuple[Path, str]:
    """The file that a name stands for, and what to call it in messages.

    A shipped preset's bare name always means the preset; `./quickstart` would be a file of that name.
    """
    presets = preset_names()
    if name in presets:
        return PRESETS / f"{name}.yaml", f"preset {name}"
    path = Path(name).expanduser() if name.startswith("~/") else Path(name)
    file = base / path if base is not None else path
    if base == PRESETS and path.stem in presets:
        return file, f"preset {path.stem}"
    in_folder = len(path.parts) != 1 and path.parts[0] != PAPER
    looks_like_path = path.suffix in {".yaml", ".yml"} or in_folder or name.startswith(".")
    if looks_like_path or _is(Path.exists, file):
        return file, _name(str(file), at_most=5000)
    near = difflib.get_close_matches(name, presets, 3, 0.4)
    hint = f"did you mean {_either(near)}?" if near else f"presets are {', '.join(presets)}"
    raise ConfigError([_line(f"{referrer}{_name(name)}", "is neither a file nor a shipped preset", hint=hint)])


def _is(test: Any, path: Path) -> bool:
    """`Path.exists` and its like, where a name that the system cannot take is simply not there."""
    try:
        return bool(test(path))
    except (OSError, ValueError):
        return False


def _identity(file: Path) -> Path:
    """One path for all names of a file, or the path itself where there is no such file."""
    try:
        return file.resolve()
    except (OSError, RuntimeError, ValueError):
        return file


def _read_mapping(file: Path, where: str) -> dict[Any, Any]:
    """The content of one YAML file, which must be a mapping."""
    if _is(Path.is_dir, file):
        raise ConfigError([_line(where, "is a directory", expected="a YAML file")])
    if not _is(Path.exists, file):
        siblings = [other.name for other in file.parent.glob("*.y*ml")] if _is(Path.is_dir, file.parent) else []
        near = difflib.get_close_matches(file.name, siblings, 1, 0.8)
        hint = f"did you mean {file.with_name(near[0])}?" if near else ""
        if file.stem in preset_names():
            hint = f"the shipped preset is called {file.stem}, without {file.suffix or 'a folder'}"
        raise ConfigError([_line(where, "no such file", hint=hint)])
    if not _is(Path.is_file, file):
        raise ConfigError([_line(where, "is not a regular file", expected="a YAML file")])
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError([_line(where, f"cannot be read: {error.strerror}")]) from None
    return parse_mapping(data, where)


def parse_mapping(data: bytes, where: str) -> dict[Any, Any]:
    """The content of a YAML file, which must be a mapping; whoever wrote it, it takes little time and memory.

    Args:
        where: what to name.

    Raises:
        ConfigError: it is too large, not UTF-8, not plain YAML, or no mapping.
    """
    if len(data) > _MAX_BYTES:
        raise ConfigError([_line(where, "is too large for a configuration", expected=f"at most {_MAX_BYTES} bytes")])
    try:
        content = _parse(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([_line(f"{where}:{line}", f"is not UTF-8 text at byte {error.start}")]) from None
    except _NotYaml as error:
        raise ConfigError([_line(f"{where}:{error.position}" if error.position else where, error.what)]) from None
    if not isinstance(content, dict):
        got = "an empty file" if content is None else _show(content)
        raise ConfigError([_line(where, "is not a configuration", expected="a mapping of sections", got=got)])
    return content


def read_overrides(schema: type[BaseModel], overrides: Iterable[str]) -> tuple[list[Layer], list[str]]:
    """Parses `section.field=value`, one layer for each, and the problems of those that cannot be parsed."""
    layers: list[Layer] = []
    problems: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, field = key.strip().partition(".")
        if not equals or not dot:
            hint = _suggest(schema, section, field) if equals else ""
            problems.append(
                _line(
                    COMMAND_LINE, "is not an override", expected="section.field=value", got=_show(override), hint=hint
                )
            )
            continue
        try:
            layers.append(Layer(COMMAND_LINE, {section: {field: _parse(text)}}))
        except _NotYaml as error:
            problems.append(_line(f"{COMMAND_LINE}: {_name(key.strip())}", error.what, got=_show(text)))
    return layers, problems


# Checking against the schema


def build(schema: type[Model], layers: Sequence[Layer], source: str, problems: Sequence[str] = ()) -> Model:
    """Merges the layers, later ones winning field by field, and checks the result.

    Args:
        source: what to name where nothing set a field.
        problems: those found so far, to be reported together with the ones found here.

    Raises:
        ConfigError: with every problem.
    """
    values, unknown = _merge(schema, layers)
    problems = [*problems, *unknown]
    try:
        config = schema.model_validate(_nested(schema, values))
    except ValidationError as error:
        wrong = _wrong_fields(error)
        problems += [_field_problem(schema, field, values, source) for field in wrong]
        # Rules run only once every field is valid by itself. So put harmless values in the place of the wrong ones, and
        # keep the violations that do not depend on those.
        for violation in _violations(schema, values, wrong) if wrong else _broken(error):
            set_by = [values[field].source for field in violation.fields if field in values]
            where = f"{set_by[0] if set_by else source}: {violation.fields[0]}"
            sides = {"expected": violation.expected, "got": violation.got}
            problems.append(_line(where, violation.what, **sides, hint=violation.hint))
    if problems:
        raise ConfigError(problems)
    return config


def _merge(schema: type[BaseModel], layers: Sequence[Layer]) -> tuple[dict[str, Value], list[str]]:
    """The last value of each known field, by its full name, and a problem for each unknown name."""
    values: dict[str, Value] = {}
    problems: list[str] = []
    for source, content in layers:
        for section, body in content.items():
            if section not in schema.model_fields:
                expected = _either(schema.model_fields)
                hint = _suggest(schema, section, next(iter(body)) if isinstance(body, dict) and body else "")
                problems.append(
                    _line(
                        f"{source}: {_name(section)}", "unknown section", expected=expected, got=_show(body), hint=hint
                    )
                )
            elif isinstance(body, dict):
                fields = _section(schema, section).model_fields
                for field, value in body.items():
                    if field in fields:
                        values[f"{section}.{field}"] = Value(value, source)
                        continue
                    where = f"{source}: {section}.{_name(field)}"
                    hint = _suggest(schema, section, field)
                    problems.append(
                        _line(where, "unknown field", expected=_either(fields), got=_show(value), hint=hint)
                    )
            elif body is not None:  # a section with nothing under it is an empty one
                problems.append(
                    _line(f"{source}: {section}", "is not a section", expected="a mapping of fields", got=_show(body))
                )
    return values, problems


def _nested(schema: type[BaseModel], values: Mapping[str, Value]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {section: {} for section in schema.model_fields}
    for name, (value, _) in values.items():
        section, _, field = name.partition(".")
        nested[section][field] = value
    return nested


def _wrong_fields(error: ValidationError) -> list[str]:
    """Full names of the fields that are missing or wrong by themselves, each once."""
    details = [item for item in error.errors(include_url=False) if item["type"] != "default_factory_not_called"]
    return list(dict.fromkeys(".".join(map(str, item["loc"][:2])) for item in details if len(item["loc"]) > 1))


def _broken(error: ValidationError) -> list[Violation]:
    causes = [item.get("ctx", {}).get("error") for item in error.errors(include_url=False)]
    return [violation for cause in causes if isinstance(cause, RulesBroken) for violation in cause.violations]


def _violations(schema: type[BaseModel], values: Mapping[str, Value], wrong: Sequence[str]) -> list[Violation]:
    """The rules that do not hold whatever the wrong fields should have been."""
    harmless = {name: value for name, value in values.items() if name not in wrong}
    for name in wrong:
        section, _, field = name.partition(".")
        if _section(schema, section).model_fields[field].is_required():
            harmless[name] = Value(1, "")  # the required fields are counts
    try:
        schema.model_validate(_nested(schema, harmless))
    except ValidationError as error:
        return [violation for violation in _broken(error) if not set(violation.fields) & set(wrong)]
    return []


def _section(schema: type[BaseModel], section: str) -> type[BaseModel]:
    annotation = schema.model_fields[section].annotation
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation


def _field_problem(schema: type[BaseModel], name: str, values: Mapping[str, Value], source: str) -> str:
    section, _, field = name.partition(".")
    spec = _section(schema, section).model_json_schema()["properties"][field]
    if name not in values:
        return _line(f"{source}: {name}", "is required and not set", expected=_allowed(spec, None))
    value, set_by = values[name]
    sides = {"expected": _allowed(spec, value), "got": _show(value)}
    return _line(f"{set_by}: {name}", "is not allowed", **sides, hint=_hint(spec, value))


def _allowed(spec: Mapping[str, Any], value: object) -> str:
    """What a field takes, in words, from its JSON schema."""
    if "anyOf" in spec:
        return " or ".join(_allowed(choice, value) for choice in spec["anyOf"])
    if "enum" in spec:
        return _either(spec["enum"])
    if spec["type"] == "array":
        return f"a list of {spec['minItems']}, each {_allowed(spec['prefixItems'][0], value)}"
    words = {"integer": "a whole number", "number": "a finite number", "boolean": "true or false", "string": "text"}
    text = words.get(str(spec["type"]), str(spec["type"]))
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = {sign: spec[key] for key, sign in signs.items() if key in spec}
    if bounds.get("<=", 0) >= COUNT_MAX and not (isinstance(value, int) and value > bounds["<="]):
        del bounds["<="]  # a safety limit, of no interest unless it was passed
    return f"{text} {' and '.join(f'{sign} {bound:.12g}' for sign, bound in bounds.items())}".strip()


def _hint(spec: Mapping[str, Any], value: object) -> str:
    """How to write what was probably meant."""
    kinds = {str(choice.get("type")) for choice in spec.get("anyOf", [spec])}
    if "enum" in spec:
        if value == "fp16" and "bf16" in spec["enum"]:
            return "did you mean bf16?"
        near = difflib.get_close_matches("none" if value is None else str(value).lower(), spec["enum"], 1, 0.5)
        return f"did you mean {near[0]}?" if near else ""
    if "integer" in kinds and isinstance(value, float) and math.isfinite(value) and value == int(value):
        return f"write {int(value)}"
    if isinstance(value, str) and len(value) < 40 and kinds & {"integer", "number", "boolean"}:
        try:
            plain = _parse(value)
        except _NotYaml:
            return ""
        return f"write {value} without quotes" if isinstance(plain, bool | int | float) else ""
    return "put it in quotes" if "string" in kinds and isinstance(value, bool | int | float) else ""


def _suggest(schema: type[BaseModel], section: object, field: object) -> str:
    """The nearest valid name for one that does not exist."""
    names = {f"{part}.{name}" for part in schema.model_fields for name in _section(schema, part).model_fields}
    near_sections = difflib.get_close_matches(str(section), list(schema.model_fields), 1)
    if near_sections:  # then look for the field in there first
        near = near_sections[0]
        if str(section) != near and (not field or f"{near}.{field}" in names):
            return f"did you mean {near}?"
        fields = difflib.get_close_matches(str(field), list(_section(schema, near).model_fields), 1)
        if fields:
            return f"did you mean {near}.{fields[0]}?"
    # A field that was put into the wrong section, or into none.
    elsewhere = sorted(name for name in names if name.partition(".")[2] in (field, section))
    if elsewhere:
        return f"did you mean {_either(elsewhere)}?"
    return f"did you mean {near_sections[0]}?" if near_sections and near_sections[0] != section else ""


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60
_REPR.maxlevel = 2


def _show(value: object) -> str:
    """A value as it is written in YAML, on one line and not too long."""
    text = _REPR.repr(value)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


def _name(key: object, at_most: int = 60) -> str:
    """A name as it was written, unless that would spoil the line."""
    return key if isinstance(key, str) and key.isprintable() and 0 < len(key) <= at_most else _show(key)


def _either(choices: Iterable[object]) -> str:
    """`a, b or c`."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
