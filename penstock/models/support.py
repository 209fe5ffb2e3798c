"""Refuses families by their config alone, before a process starts. Imports without torch."""

from typing import Any

from penstock.errors import UserError

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def check_family(name_or_path: str, *, trust_remote_code: bool = False) -> None:
    """Refuse the family of a model whose config is known to load."""
    from transformers import AutoConfig

    reason = refusal_by_config(AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code))
    if reason is not None:
        raise UserError(reason)


def refusal_by_config(config: Any) -> str | None:
    """Return why models of this config can't be served, in a sentence that names the family, or None if the config
    gives no reason. The config of a model that brings its own code gives none."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    family = config.model_type
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return None
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    if model_class is None:
        whole = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(family)
        return whole and (
            f"{whole} can't be served: vision and audio models are not supported, and transformers does not load "
            f"the text part of {family} as a causal LM; choose a text model"
        )
    text = config.get_text_config()
    others = {*(getattr(text, "layer_types", None) or ())} - ATTENTION_LAYERS
    if getattr(text, "cross_attention_layers", None):
        others.add("cross_attention")
    return other_layers(model_class, ", ".join(sorted(others)), config) if others else None


def other_layers(model_class: str, kinds: str, config: Any) -> str:
    """Return the sentence for a model with layers that are not attention."""
    return (
        f"{model_class} can't be served: not all of its layers are plain attention ({kinds}), and engines here "
        "keep nothing but keys and values; choose a family in which every layer has attention, not "
        f"{config.model_type}"
    )
