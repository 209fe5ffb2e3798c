"""Loads a model's config, and refuses families that can't be served by their config and code alone.

Transformers' code of a family is read as text, and a `config.json` as it is: importing either would import
torch, which takes a second, and a run refuses what it can't have before it starts anything.
"""

import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import UserError

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
OLD_NAMES = {"attention": "full_attention", "mamba": "linear_attention"}
"""Kinds of layers as configs on the hub name them, which transformers renames."""
STATEFUL = re.compile(r"^    _is_stateful\b.*= (True|False)$", re.MULTILINE)


def load_config(name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """Load the model's config alone: cheap, and enough to refuse a bad name before anything heavy starts."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except Exception as error:
        # What transformers raises depends on what is missing or broken in the folder.
        hint = "" if Path(name_or_path).exists() else " (no such folder here, nor in the hub's cache)"
        raise UserError(f"model {name_or_path!r} could not be loaded{hint}: {first_line(error)}") from error


class RawConfig:
    """Holds what a `config.json` says by itself, without the defaults of its family."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def get_text_config(self) -> "RawConfig":
        inner = vars(self).get("text_config")
        return RawConfig(**inner) if isinstance(inner, dict) else self


def read_config(name_or_path: str) -> RawConfig | None:
    """Read the `config.json` in a folder or in the hub's cache. None if there is none, or if it is no object: then
    `load_config` finds out what is wrong."""
    found: Any = Path(name_or_path) / "config.json"
    if not Path(name_or_path).is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(name_or_path, "config.json")
        except HFValidationError:
            return None
    try:
        values = json.loads(Path(found).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError, RecursionError):
        return None
    return RawConfig(**values) if isinstance(values, dict) else None


def check_supported(config: Any) -> None:
    """Refuse a family by its config and its code, before any weights are loaded. Its code must use transformers'
    attention interface, behind which Penstock puts its own attention, and all of its layers must be
    attention."""
    reason = refusal(config)
    if reason is not None:
        raise UserError(reason)


def refusal(config: Any) -> str | None:
    """Return why models of this config can't be served, in a sentence that names the family, or None if they
    can. The config of a model that brings its own code gives no reason."""
    family = str(getattr(config, "model_type", ""))
    is_raw, own = type(config) is RawConfig, getattr(config, "auto_map", None) or {}
    is_known = is_raw or type(config).__module__.startswith("transformers.models.")
    if not is_known or "AutoModelForCausalLM" in own or (is_raw and own):
        return None
    found = _causal_lm(family)
    if found is None:
        whole = _class_name(family, "IMAGE_TEXT_TO_TEXT") or _class_name(family, "MULTIMODAL_LM")
        return whole and (
            f"{whole} can't be served: vision and audio models are not supported, and transformers does not load "
            f"the text part of {family} as a causal LM; choose a text model"
        )
    name, code = found
    if others := _other_layers(config.get_text_config(), name, code):
        return (
            f"{name} can't be served: not all of its layers are plain attention ({others}), and engines here "
            f"keep nothing but keys and values; choose a family in which every layer has attention, not {family}"
        )
    if "ALL_ATTENTION_FUNCTIONS" not in code:
        return (
            f"{name} can't be served: its code in transformers does not use the attention interface, behind "
            f"which Penstock puts its own attention; choose a family that does, not {family}"
        )
    return None


def _other_layers(text: Any, name: str, code: str) -> str:
    """Return the kinds of layers that are not attention. A class is asked only where its config does not say: dense
    models may share one with hybrids."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    others = {OLD_NAMES.get(kind, kind) for kind in kinds} - ATTENTION_LAYERS
    if getattr(text, "cross_attention_layers", None):
        others.add("cross_attention")
    if not kinds and _is_stateful(name, code):
        others.add("some are recurrent")
    return ", ".join(sorted(others))


def is_certainly_dense(config: RawConfig) -> bool:
    """Return whether neither a `config.json` nor its family's defaults speak of experts."""
    folder = _folder_of(str(getattr(config, "model_type", "")))
    if folder is None or hasattr(config, "auto_map") or "expert" in str(vars(config)):
        return False
    return not any("expert" in path.read_text(encoding="utf-8") for path in folder.glob("configuration_*.py"))


def _models() -> Path | None:
    """Return transformers' folder of families, without importing it."""
    spec = find_spec("transformers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "models"


def _folder_of(family: str) -> Path | None:
    """Return the folder with transformers' code of a family, whose config class has its name."""
    models = _models()
    for path in [] if models is None else models.glob("*/configuration_*.py"):
        if f'model_type = "{family}"' in path.read_text(encoding="utf-8"):
            return path.parent
    return None


def _class_name(family: str, table: str) -> str | None:
    """Return the class for a family in one of transformers' tables."""
    models = _models()
    text = "" if models is None else (models / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    _, _, after = text.partition(f"\nMODEL_FOR_{table}_MAPPING_NAMES = ")
    named = re.search(rf'"{re.escape(family)}",\s*"(\w+)"', after.partition("\n)")[0])
    return None if named is None else named[1]


def _causal_lm(family: str) -> tuple[str, str] | None:
    """Return the name of the family's causal LM in transformers, and the text of the file that defines it."""
    name, folder = _class_name(family, "CAUSAL_LM"), _folder_of(family)
    for path in [] if name is None or folder is None else sorted(folder.glob("modeling_*.py")):
        code = path.read_text(encoding="utf-8")
        if name is not None and f"\nclass {name}(" in code:
            return name, code
    return None


def _is_stateful(name: str, code: str) -> bool:
    """Return what the class, or the first of its bases in the same file that says so, gives as `_is_stateful`."""
    parts = re.split(r"^class (\w+)\b", code, flags=re.MULTILINE)[1:]
    classes = dict(zip(parts[::2], parts[1::2], strict=True))
    said = (STATEFUL.search(classes[one]) for one in _lineage(name, classes))
    return next((found[1] == "True" for found in said if found is not None), False)


def _lineage(name: str, classes: Mapping[str, str]) -> Iterator[str]:
    """Yield a class and its bases that are among these."""
    yield name
    bases = re.match(r"\(([^)]*)\)", classes[name])
    for base in re.findall(r"\w+", bases[1]) if bases else ():
        if base in classes:
            yield from _lineage(base, classes)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
