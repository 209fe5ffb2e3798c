"""Loads a validated config from a YAML file and `section.key=value` words, with one-sentence errors."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from penstock.config.secrets import HIDDEN, is_secret, refuse_hidden
from penstock.config.section import section_of, unknown_key_message
from penstock.errors import ConfigError

UNION_MEMBER = re.compile(r"(constrained-)?(int|float|bool|str)|(tuple|dict|literal)\[.*|[A-Z]\w+Config")
"""What pydantic puts into the place of an error for the type that it tried: no key of the config."""
Root = TypeVar("Root", bound=BaseModel)

MAX_DEPTH = 50
"""The deepest nesting of a config."""


def load_config(root: type[Root], path: Path | None, overrides: Sequence[str] = ()) -> Root:
    data = read_yaml(path) if path is not None else {}
    for override in overrides:
        apply_override(_spelled_out(root, data), override)
    return build(root, data)


def _spelled_out(root: type[BaseModel], data: dict[str, Any]) -> dict[str, Any]:
    """Replace words that stand for a section by the section, so that its other keys can be set."""
    for name, field in root.model_fields.items():
        section = section_of(field.annotation)
        alone = getattr(section, "alone", "")
        if alone and isinstance(data.get(name), str):
            data[name] = {alone: data[name]}
    return data


class _TooDeep(Exception):
    """Raised for nesting deeper than any config needs."""


class _Loader(yaml.SafeLoader):
    """Stops at `MAX_DEPTH` while it reads: the parser's work for each further level grows with the levels around
    it."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.depth > MAX_DEPTH:
            raise _TooDeep
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _parse(text: str) -> Any:
    return yaml.load(text, _Loader)


def read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; `penstock init` writes a starter")
    try:
        data = _parse(path.read_text(encoding="utf-8"))
    except _TooDeep as error:
        raise ConfigError(f"config file {path} is nested more than {MAX_DEPTH} levels deep") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not text in UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it can't be parsed"
        raise ConfigError(f"config file {path} is not valid YAML{where}: {problem}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path} must hold sections (key: value), got a {type(data).__name__}")
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one dotted key in nested data. The value is parsed as YAML, so `3`, `true` and `[a, b]` are a number,
    a boolean and a list."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"an override must look like section.key=value, got {override!r}")
    *parents, last = key.split(".")
    node = data
    for parent in parents:
        child = node.get(parent)
        if child is None:  # missing, or `rollout:` with nothing below it
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
        node = child
    try:
        node[last] = _parse(text) if text else ""
    except _TooDeep as error:
        raise ConfigError(f"override {key}: its value is nested more than {MAX_DEPTH} levels deep") from error
    except yaml.YAMLError as error:
        shown = HIDDEN if is_secret(last) else text
        raise ConfigError(f"override {key}={shown}: {shown!r} is not a valid value") from error


def build(root: type[Root], data: dict[str, Any]) -> Root:
    data = _without_empty_sections(root, data)
    check_keys(root, data, "")
    refuse_hidden(data)
    return build_section(root, data)


def build_section(section: type[Root], data: dict[str, Any], path: str = "") -> Root:
    """Validate one section alone. `path` is the position of its keys in the config, for the error message."""
    try:
        return section.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_sentence(error)}" if path else _sentence(error)) from error


def _without_empty_sections(model: type[BaseModel], data: Any) -> Any:
    """Remove sections that are empty (`tasks:` with nothing below it), so that they get their defaults."""
    if not isinstance(data, dict):
        return data
    sections = {name: section_of(field.annotation) for name, field in model.model_fields.items()}
    kept = {}
    for name, value in data.items():
        section = sections.get(name)
        if section is not None and value is None:
            continue
        kept[name] = value if section is None else _without_empty_sections(section, value)
    return kept


def check_keys(model: type[BaseModel], data: Any, path: str) -> None:
    """Refuse unknown keys at any depth, by their dotted name."""
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        if key not in model.model_fields:
            where = f"section {path!r}" if path else "the config"
            raise ConfigError(unknown_key_message(str(key), model, where, path))
        section = section_of(model.model_fields[key].annotation)
        if section is not None:
            check_keys(section, value, f"{path}.{key}" if path else str(key))


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if not UNION_MEMBER.fullmatch(str(part)))
    message = first["msg"].removeprefix("Value error, ")
    shown = HIDDEN if is_secret(str(first["loc"][-1] if first["loc"] else "")) else first.get("input")
    got = f", got {shown!r}" if isinstance(shown, (str, int, float, bool)) else ""
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {message[0].lower()}{message[1:]}{got}{more}" if where else f"{message}{more}"
