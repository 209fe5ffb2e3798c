"""Adapts a start message to this machine: the controller's paths become those of the copies here, and an empty
interface becomes the address by which the controller was reached."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Record = TypeVar("Record")

LOOPBACK = "127."


def moved(record: Record, places: Mapping[str, str], address: str = "") -> Record:
    """Return the record with changed paths and interface. `places` maps folders of the controller's machine to
    their copies here. `address` is this machine's, as the controller sees it; it replaces an empty
    `interface`."""
    if not isinstance(record, msgspec.Struct) or not (places or address):
        return record
    plain: dict[str, Any] = _walk(msgspec.to_builtins(record, builtin_types=(bytes,)), places)
    if address and not address.startswith(LOOPBACK):
        for section in (plain, plain.get("sync")):
            if isinstance(section, dict) and section.get("interface") == "":
                section["interface"] = address
    return msgspec.convert(plain, type(record), builtin_types=(bytes,))


def _walk(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _path(value, places)
    if isinstance(value, dict):
        return {_walk(key, places): _walk(each, places) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_walk(each, places) for each in value)
    return value


def _path(text: str, places: Mapping[str, str]) -> str:
    """Return the path of the copy if it exists. Other paths may be on a disk that both machines see."""
    for theirs, ours in places.items():
        if text == theirs:
            return ours
        if text.startswith(f"{theirs}/"):
            here = ours + text.removeprefix(theirs)
            file = here.rpartition(":")[0] if ".py:" in here else here
            if Path(file).exists():
                return here
    return text
