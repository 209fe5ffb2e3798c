"""How many experts a model has, from its config alone. Imports without torch."""

from typing import Any

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of experts among which a router chooses."""


def num_experts_of(config: Any) -> int:
    """Experts that a router of a model with this config chooses among; 0 for a dense model."""
    text = config.get_text_config()
    counts = (getattr(text, name, None) for name in EXPERT_COUNTS)
    most = max((count for count in counts if isinstance(count, int)), default=0)
    return most if most > 1 else 0


def count_experts(name_or_path: str, *, trust_remote_code: bool = False) -> int:
    """The same for a model by name or folder, whose config is known to load."""
    from transformers import AutoConfig

    return num_experts_of(AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code))
