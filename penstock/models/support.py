"""Which model families can be served and trained, from their config alone.

Penstock puts its own attention behind transformers' attention interface. A family that does not use the interface,
or whose layers are not all attention, is refused here with the reason, before any weight is loaded.
"""

import sys
from typing import Any

from transformers import AutoModelForCausalLM

from penstock.errors import UserError

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def check_supported(config: Any) -> None:
    """Raise for a config whose family can't be served."""
    reason = refusal(config)
    if reason is not None:
        raise UserError(reason)


def refusal(config: Any) -> str | None:
    """Why models of this config can't be served, in a sentence that names the family; None when nothing speaks
    against it."""
    family = getattr(config, "model_type", type(config).__name__)
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        return None  # transformers says it better, or the model brings its own code
    others = sorted({*(getattr(config.get_text_config(), "layer_types", None) or ())} - ATTENTION_LAYERS)
    if others or model_class._is_stateful:
        return (
            f"{model_class.__name__} can't be served: not all of its layers are plain attention "
            f"({', '.join(others) or 'some are recurrent'}), and engines here keep nothing but keys and values; "
            f"choose a family whose every layer is attention, not {family}"
        )
    if not hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return (
            f"{model_class.__name__} can't be served: its code in transformers does not use the attention "
            f"interface, behind which Penstock puts its own attention; choose a family that does, not {family}"
        )
    return None
