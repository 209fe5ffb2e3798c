"""How many experts a model has, from its config alone. Imports without torch."""

from collections.abc import Iterator, Mapping
from typing import Any

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of experts among which a router chooses."""
OTHER_COUNTS = ("shared", "active", "activated", "selected", "zero")
"""Words in the names of numbers that are of other experts, or of those that were chosen."""


def num_experts_of(config: Any) -> int:
    """Experts that a router of a model with this config chooses among, the most where layers differ; 0 for a dense
    model. Without one of the usual names, any that ends in `experts` counts. If that is wrong, the model is refused
    by name when its routers are looked for, which is better than to take it for a dense one."""
    parts = list(_parts(config.get_text_config()))
    usual = [count for part in parts for name in EXPERT_COUNTS for count in _counts(part.get(name))]
    if usual:
        most = max(usual)
    else:
        others = [
            count for part in parts for name in part if _may_count(name) for count in _counts(part[name])
        ]
        most = max(others, default=0)
    return most if most > 1 else 0


def count_experts(name_or_path: str, *, trust_remote_code: bool = False) -> int:
    """The same for a model by name or folder, whose config is known to load."""
    from transformers import AutoConfig

    return num_experts_of(AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code))


def _parts(config: Any) -> Iterator[Mapping[str, Any]]:
    """The fields of a config, and those of the configs inside it: DBRX has its experts in `ffn_config`."""
    own = vars(config)
    yield own
    # What a class calls otherwise (`attribute_map`) is not among its fields.
    yield {name: getattr(config, name, None) for name in EXPERT_COUNTS}
    for field in own.values():
        if isinstance(field, Mapping):
            yield field
        elif hasattr(field, "to_dict"):
            yield vars(field)


def _may_count(name: object) -> bool:
    return isinstance(name, str) and name.endswith("experts") and not set(OTHER_COUNTS) & set(name.split("_"))


def _counts(said: Any) -> Iterator[int]:
    """Some models say a number for each layer."""
    for each in said if isinstance(said, (list, tuple)) else [said]:
        if isinstance(each, int) and not isinstance(each, bool):
            yield each
