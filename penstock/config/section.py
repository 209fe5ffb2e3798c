"""Defines the base of every config section: frozen, strict about keys, and without infinite or NaN numbers."""

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from penstock.errors import ConfigError

MAX_INTEGER = 2**63 - 1


class Section(BaseModel):
    """Is the base of frozen config sections. An unknown key is an error that names the nearest known one.

    The string under a field is its description (`use_attribute_docstrings`). `docs/configuration.md` and the
    config that `penstock init` writes are generated from these strings.
    """

    alone: ClassVar[str] = ""
    """The key that is set by a single word instead of a section: `launcher: ray` is `launcher: {kind: ray}`.
    Empty: no such key."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keys that users of other libraries look for here, and what to set for each."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, str) and cls.alone:
            data = {cls.alone: data}
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    raise ConfigError(unknown_key_message(str(key), cls, cls.__name__))
        return data

    @field_validator("*", mode="before")
    @classmethod
    def _understand_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert a boolean back to `on` or `off` where these words are choices, since YAML reads them as
        booleans. Refuse it where a number is expected: pydantic would take it for 1 or 0."""
        assert info.field_name is not None
        expected = set(_leaves(cls.model_fields[info.field_name].annotation))
        word = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else None
        if word in expected:
            return word
        each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if bool not in expected and expected & {int, float} and any(isinstance(one, bool) for one in each):
            raise ValueError("input should be a number, not true or false")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _fits_in_64_bits(cls, value: Any) -> Any:
        """Refuse integers above 64 bits: configs travel to processes and libraries that can't hold them."""
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"input should be at most {MAX_INTEGER}")
        return value


def unknown_key_message(key: str, section: type[BaseModel], where: str, path: str = "") -> str:
    """Name the nearest known key. `path` is the position of the section in the config."""
    if (instead := _elsewhere(key, section)) is not None:
        return f"unknown key {key!r} in {where}; {instead}"
    near = nearest_key(key, section)
    within = f"{path}." if path and near is not None and "." in near else ""
    known = ", ".join(sorted(section.model_fields))
    hint = f"known keys: {known}" if near is None else f"did you mean {within + near!r}?"
    return f"unknown key {key!r} in {where}; {hint}"


def _elsewhere(key: str, section: type[BaseModel]) -> str | None:
    """Return what to set in the place of a key that another library has, here or in a section inside this one."""
    inner = [section_of(field.annotation) for field in section.model_fields.values()]
    known = (getattr(one, "elsewhere", {}).get(key) for one in (section, *inner))
    return next((instead for instead in known if instead is not None), None)


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types and the words that an annotation is made of."""
    parts = get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        parts = parts[:1]
    if not parts:
        yield annotation
    for part in parts:
        yield from _leaves(part)


def nearest_key(key: str, section: type[BaseModel]) -> str | None:
    """Return a key that may have been meant, including keys of sections inside this one: `max_batch` of `engine`
    is `embedded.max_batch`."""
    places = {
        name: f"{inner}.{name}"
        for inner, field in section.model_fields.items()
        if (held := section_of(field.annotation)) is not None
        for name in held.model_fields
    } | {name: name for name in section.model_fields}
    near = [key] if key in places else difflib.get_close_matches(key, list(places), n=1, cutoff=0.5)
    return places[near[0]] if near else None


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class of a field, looking through `Section | None`."""
    candidates = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        candidates = list(get_args(annotation))
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
