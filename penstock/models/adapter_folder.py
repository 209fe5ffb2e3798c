"""Reads LoRA adapters as peft saves them, without peft, and refuses those that hold more than LoRA matrices.

adapter_config.json           what kind of adapter, on which layers, of which model
adapter_model.safetensors     its tensors, named base_model.model.LAYER.lora_A.weight and so on
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.errors import UserError
from penstock.models.config import LoraConfig

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PLAIN: dict[str, Any] = {
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "target_parameters": None,
    "layer_replication": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "use_bdlora": None,
    "kasa_config": None,
    "lora_bias": False,
    "use_qalora": False,
    "fan_in_fan_out": False,
}
"""Other features of peft, by config key, with the value that means the feature is off."""

STARTS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base weights unchanged. The others (PiSSA, OLoRA, CorDA, LoftQ,
LoRA-GA) take the initial matrices out of them, so the trained matrices fit base weights that no folder holds."""

NARROWED_BY = ("layers_to_transform", "exclude_modules")
"""Settings that leave out some of the layers that `target_modules` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    folder: Path
    lora: LoraConfig
    base: str | None
    """The model that it was trained on, by the name used then."""


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def model_below(name_or_path: str) -> tuple[str, Path | None]:
    """Return the model to load and the adapter to put on it. An adapter's folder names its model; any other name
    is a model without an adapter."""
    folder = Path(name_or_path)
    if not is_adapter(folder):
        return name_or_path, None
    base = read_adapter(folder).base
    if base is None:
        raise UserError(f"{folder / CONFIG} does not name the model below it (base_model_name_or_path)")
    return base, folder


def read_adapter(folder: Path) -> SavedAdapter:
    """Read an adapter's config without loading its tensors. Raise `UserError` unless it is plain LoRA or DoRA."""
    if not is_adapter(folder) or not (folder / TENSORS).is_file():
        raise UserError(
            f"{folder} is not an adapter: it must be a folder with {CONFIG} and {TENSORS}, as peft saves it"
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if config.get("peft_type") != "LORA":
            raise UserError(
                f"the adapter in {folder} must be a LoRA adapter, got {config.get('peft_type')!r}"
            )
        _refuse_others(folder, config)
        lora = LoraConfig(
            rank=config["r"],
            alpha=config["lora_alpha"],
            targets=_targets(folder, config),
            dropout=config.get("lora_dropout") or 0.0,
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
        )
    except (OSError, ValueError, KeyError, AttributeError, ValidationError) as error:
        raise UserError(f"{folder / CONFIG} can't be read ({type(error).__name__}: {error})") from error
    return SavedAdapter(folder=folder, lora=lora, base=config.get("base_model_name_or_path"))


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the saved tensors, by the names under which they are sent to engines."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / TENSORS, framework="np") as file:
            return {
                name.removeprefix(PREFIX): tuple(file.get_slice(name).get_shape())
                for name in file.keys()  # noqa: SIM118
            }
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / TENSORS} can't be read ({error})") from error


def _refuse_others(folder: Path, config: dict[str, Any]) -> None:
    for key, plain in PLAIN.items():
        if config.get(key, plain) not in (plain, None, [], {}):
            raise UserError(
                f"the adapter in {folder} has {key}={config[key]!r}, and only plain LoRA matrices are supported"
            )
    start = config.get("init_lora_weights", True)
    if str(start).lower() not in STARTS:
        raise UserError(
            f"the adapter in {folder} has init_lora_weights={start!r}, and an adapter must leave the weights below "
            "it as they are; make a plain one of it with peft, save_pretrained(FOLDER, "
            "path_initial_model_for_weight_conversion=FIRST_ADAPTER), or merge it with merge_and_unload() and name "
            "the merged model"
        )


def _targets(folder: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """Return the names that the adapter lists. If it has a pattern or a selection of layers, return the layers
    whose tensors were saved."""
    given = config.get("target_modules")
    if isinstance(given, list) and not any(config.get(key) for key in NARROWED_BY):
        return tuple(sorted(given))
    return tuple(sorted({name.partition(".lora_")[0] for name in tensor_shapes(folder)}))
