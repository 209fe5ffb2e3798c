"""Makes texts from the config classes: a config with every key, and the configuration reference."""

import types
import typing
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel

from penstock.config.root import PenstockConfig
from penstock.config.section import section_of


def whole_config() -> str:
    """Return a config with every key, its meaning and its default; defaults are commented out."""
    lines = ["# A Penstock run. `penstock train THIS_FILE [section.key=value …]`", ""]
    for name, field in PenstockConfig.model_fields.items():
        lines += [*_section_with_defaults(name, field.default), ""]
    return "\n".join(lines).replace("  # name: builtin", "  name: builtin")


def _section_with_defaults(name: str, section: BaseModel, indent: str = "") -> list[str]:
    lines = [f"{indent}# {_one_line(type(section).__doc__)}", f"{indent}{name}:"]
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            lines += _section_with_defaults(key, value, indent + "  ")
            continue
        lines += [f"{indent}  # {line}" for line in _wrapped(field.description)]
        lines.append(f"{indent}  # {key}: {_yaml(value)}")
    return lines


def configuration_reference() -> str:
    """Return the text of `docs/configuration.md`."""
    lines = [
        "# Configuration reference",
        "",
        "Generated from the config classes by `make docs`; do not edit. Every key can be set in the YAML",
        "file or on the command line as `section.key=value`. An unknown key is an error that names the",
        "nearest one.",
        "",
    ]
    for name, field in PenstockConfig.model_fields.items():
        lines += _reference_section(name, field.default)
    return "\n".join(lines)


def _reference_section(name: str, section: BaseModel) -> list[str]:
    """Return a table of the section's keys, followed by the sections inside it."""
    lines = [f"## `{name}`", "", _one_line(type(section).__doc__), "", "| key | type | default | meaning |"]
    lines.append("|---|---|---|---|")
    inner: list[str] = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            inner += _reference_section(f"{name}.{key}", value)
            continue
        if (own := _own_section(field.annotation)) is not None:
            inner += _reference_section(f"{name}.{key}", own())
        meaning = _one_line(field.description).replace("|", "\\|")
        lines.append(f"| `{key}` | {_type_name(field.annotation)} | `{_yaml(value)}` | {meaning} |")
    return [*lines, "", *inner]


def _own_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section class that a key may hold, unless the reference describes that section elsewhere."""
    section = section_of(annotation)
    described = {type(field.default) for field in PenstockConfig.model_fields.values()}
    return None if section in described else section


def _yaml(value: Any) -> str:
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    if isinstance(plain, (list, tuple)):
        plain = [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in plain]
    if not isinstance(plain, (str, int, float, bool, list, dict, type(None))):
        plain = str(plain)
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _wrapped(text: str | None, width: int = 100) -> list[str]:
    """Wrap a text without breaking what is in backticks."""
    import re
    import textwrap

    whole = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\N{NO-BREAK SPACE}"), _one_line(text))
    lines = textwrap.wrap(whole, width, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin is Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in typing.get_args(annotation) if part is not type(None))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"section as `{annotation.__name__.removesuffix('Config').lower()}`"
    return str(getattr(annotation, "__name__", annotation))
