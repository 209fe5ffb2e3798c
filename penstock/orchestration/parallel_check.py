"""What a trainer of several ranks can't do is refused before any process starts, in one sentence."""

from importlib.util import find_spec
from typing import Any

from penstock.errors import ConfigError
from penstock.models.expert_count import num_experts_of
from penstock.orchestration.config import PenstockConfig
from penstock.trainer.parallel.rank_layout import check_layout

STYLES = frozenset(
    {
        "colwise",
        "colwise_gather_output",
        "colwise_rep",
        "embedding_rowwise",
        "replicate",
        "replicated_with_grad_allreduce",
        "rowwise",
        "rowwise_rep",
        "rowwise_split_input",
    }
)
"""Ways in which transformers' plans split a weight, of those that leave each rank one connected part of it."""


def check_parallel(config: PenstockConfig, name_or_path: str) -> None:
    """For a model by name or folder, whose config is known to load."""
    if config.trainer.parallel.num_ranks == 1:
        return
    from transformers import AutoConfig

    trusted = config.model.trust_remote_code
    check_ranks(config, AutoConfig.from_pretrained(name_or_path, trust_remote_code=trusted))


def check_ranks(config: PenstockConfig, model: Any) -> None:
    """`model` is the model's Hugging Face config."""
    parallel = config.trainer.parallel
    check_layout(parallel, model)
    layout = ", ".join(f"{name}={size}" for name, size in parallel.model_dump().items() if size > 1)
    refusals = {
        f"run.deterministic must be false with several ranks ({layout})": config.run.deterministic,
        f"a mixture of experts can be trained with trainer.parallel.data and shard, got {layout}": (
            parallel.context * parallel.tensor > 1 and num_experts_of(model) > 0
        ),
    }
    for sentence, is_refused in refusals.items():
        if is_refused:
            raise ConfigError(sentence)
    if parallel.tensor > 1:
        _check_tensor(config, model, layout)


def _check_tensor(config: PenstockConfig, model: Any, layout: str) -> None:
    text = model.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    others = sorted(set(plan.values()) - STYLES)
    use = "use trainer.parallel.shard"
    refusals = {
        f"trainer.parallel.tensor needs transformers 5.21 or later ({layout}); upgrade it, or {use}": (
            find_spec("transformers.distributed.tensor_parallel") is None
        ),
        f"trainer.parallel.tensor must be 1 for {text.model_type}, for which transformers has no plan, got "
        f"{layout}; {use}": not plan,
        f"trainer.parallel.tensor must be 1 for {text.model_type}, whose plan splits weights by "
        f"{' and '.join(others)}, got {layout}; {use}": bool(others),
        f"an adapter can be trained with trainer.parallel.data, shard and context, got {layout}": (
            config.model.trains_adapter
        ),
        f"trainer.compile must be off with trainer.parallel.tensor, got on ({layout})": (
            config.trainer.compile == "on"
        ),
    }
    for sentence, is_refused in refusals.items():
        if is_refused:
            raise ConfigError(sentence)
