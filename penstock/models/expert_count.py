"""Counts a model's experts from its config alone. Imports without torch."""

from collections.abc import Iterator, Mapping
from typing import Any

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names in configs for the number of experts that a router chooses among."""
OTHER_COUNTS = ("shared", "active", "activated", "selected", "zero")
"""Words in the names of other counts: experts that no router chooses among, or how many are chosen."""


def num_experts_of(config: Any) -> int:
    """Return how many experts a router of this model chooses among, the largest number if layers differ; 0 for a
    dense model. If a config has none of the usual names, any that ends in `experts` counts. A wrong guess
    makes the search for routers refuse the model by name, which is better than to take it for a dense one."""
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
    """Load the config of a model that is known to load, and return `num_experts_of` it."""
    from transformers import AutoConfig

    return num_experts_of(AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code))


def _parts(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the fields of a config, and those of the configs inside it: DBRX has its experts in `ffn_config`."""
    own = vars(config)
    yield own
    # Aliases of a config class (`attribute_map`) are not among its fields.
    yield {name: getattr(config, name, None) for name in EXPERT_COUNTS}
    for field in own.values():
        if isinstance(field, Mapping):
            yield field
        elif hasattr(field, "to_dict"):
            yield vars(field)


def _may_count(name: object) -> bool:
    return isinstance(name, str) and name.endswith("experts") and not set(OTHER_COUNTS) & set(name.split("_"))


def _counts(said: Any) -> Iterator[int]:
    """Yield the numbers in a field: some models have one for each layer."""
    for each in said if isinstance(said, (list, tuple)) else [said]:
        if isinstance(each, int) and not isinstance(each, bool):
            yield each
