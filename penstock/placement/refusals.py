"""Refuses, before any process starts, what a config asks for and its parts can't do.

Engines are checked against what their kinds can do, the model by its config alone, a trainer of several ranks
against both. Nothing here imports torch.
"""

from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from penstock.config.root import PenstockConfig
from penstock.config.unresolved import AUTO
from penstock.engines.kinds import DEFAULT_KIND, kind_of, settings_of
from penstock.errors import ConfigError, UserError
from penstock.models.config import ALL_LINEAR, adapters_on_experts
from penstock.models.expert_count import num_experts_of
from penstock.models.support import RawConfig, check_supported, is_certainly_dense
from penstock.placement.automatic import sites_of
from penstock.placement.gpus import Gpu, why_missing
from penstock.placement.shares import usable_cores
from penstock.trainer.parallel.rank_layout import check_layout

INTERRUPT = "interrupt:"
RANKS_PER_CORE = 4
"""The most ranks of a trainer for each core of a machine without GPUs."""
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
"""The ways to split a weight in transformers' plans that leave each rank one contiguous part of it."""


def needed_capabilities(config: PenstockConfig, *, trains: bool = True) -> dict[str, str]:
    """Return each needed capability with the setting that asks for it. Without `trains`, those of an evaluation."""
    rollout = config.rollout
    needed = {"seed": f"run.seed={config.run.seed}"}
    needed |= _of_training(config) if trains else _of_evaluation(config)
    cuts = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for name, off in cuts.items():
        if getattr(rollout, name) != off:
            needed["sampling_mask" if trains else "truncation"] = f"rollout.{name}={getattr(rollout, name)}"
    if rollout.stop:
        needed["stop_strings"] = f"rollout.stop={list(rollout.stop)}"
    if config.eval.tasks is not None and config.eval.temperature == 0:
        needed["greedy"] = "eval.temperature=0"
    return needed


def check_capabilities(config: PenstockConfig, *, trains: bool = True, gpus: Sequence[Gpu] = ()) -> None:
    """Refuse a config that needs what engines of one of its kinds can't do on this machine, with these GPUs."""
    needed = needed_capabilities(config, trains=trains)
    lora = config.model.lora if trains and config.model.trains_adapter else None
    device = _engine_device(config, gpus)
    for member in {member.kind: member for member in config.engine.members}.values():
        settings_of(member)  # checks the settings of a kind by path
        kind = kind_of(member.kind)
        can, elsewhere = (kind.can(member.model_copy(update={"device": on}), lora) for on in (device, "cuda"))
        beside = ["model.lora"] * (lora is not None) + ["engine.record_routing=on"] * ("routing" in needed)
        _check_kind(member.kind, needed, can, beside, elsewhere)


def _engine_device(config: PenstockConfig, gpus: Sequence[Gpu]) -> str:
    """Return `engine.device`, and `cpu` for `auto` where this machine certainly has no GPU for engines."""
    own = config.model.device if config.engine.device == AUTO else config.engine.device
    is_here = config.launcher.is_local and not config.placement.engines
    return "cpu" if own == AUTO and is_here and why_missing("cuda", gpus) is not None else own


def _check_kind(
    kind: str,
    needed: Mapping[str, str],
    can: Collection[str],
    beside: Sequence[str],
    elsewhere: Collection[str],
) -> None:
    """Refuse what a kind lacks. `beside` are settings that an engine's interrupts depend on; `elsewhere` is what
    it can do on a GPU."""
    interrupts = [each.removeprefix(INTERRUPT) for each in can if each.startswith(INTERRUPT)]
    lacking = [name for name in needed if name not in can]
    if lacking and lacking[0].startswith(INTERRUPT) and interrupts:
        settings = " and ".join([f"engine.kind={kind}", *beside])
        raise UserError(
            f"sync.interrupt must be {' or '.join(interrupts)} with {settings}, got "
            f"{lacking[0].removeprefix(INTERRUPT)}"
        )
    if lacking:
        wants = ", ".join(f"{name} (for {needed[name]})" for name in lacking)
        where = " on a CPU" if all(name in elsewhere for name in lacking) else ""
        raise UserError(
            f"engine.kind={kind} lacks {wants}{where}; change the setting, or choose another engine.kind"
        )


def _of_training(config: PenstockConfig) -> dict[str, str]:
    interrupt, num_ranks = config.sync.interrupt, config.trainer.parallel.num_ranks
    needed = {
        "logprobs": "training",
        "versions": "training",
        f"{INTERRUPT}{interrupt}": f"sync.interrupt={interrupt}",
    }
    if config.sync.selection == "delta":
        needed["delta"] = "sync.selection=delta"
    if config.model.trains_adapter:
        needed["adapters"] = "model.lora"
    if config.model.lora is not None and config.model.lora.dora:
        needed["dora"] = "model.lora.dora=true"
    if config.engine.record_routing == "on":
        needed["routing"] = "engine.record_routing=on"
    if num_ranks > 1:
        needed["shards"] = f"trainer.parallel, of {num_ranks} ranks"
    return needed


def _of_evaluation(config: PenstockConfig) -> dict[str, str]:
    return {"merged_adapters": f"model.adapter={config.model.adapter}"} if config.model.adapter else {}


def check_num_ranks(config: PenstockConfig, gpus: Sequence[Gpu]) -> None:
    """Refuse more ranks than one machine can have, where no launcher reaches others."""
    ranks, site = config.trainer.parallel.num_ranks, sites_of(config, gpus).trainer
    most = len(gpus) if site.is_gpu else RANKS_PER_CORE * usable_cores()
    if config.launcher.reaches_other_machines or ranks <= max(most, 1) or (site.is_gpu and not gpus):
        return
    has = (
        f"shows {most} GPUs" if site.is_gpu else f"can have {most} on a CPU ({RANKS_PER_CORE} for each core)"
    )
    raise UserError(
        f"trainer.parallel has {ranks} ranks, and this machine {has}; lower trainer.parallel, or name a launcher "
        "that reaches other machines"
    )


def check_model(config: PenstockConfig, model: Any, gpus: Sequence[Gpu] = (), *, trains: bool = True) -> None:
    """Refuse what this model can't have, by its Hugging Face config alone. The trainer computes the model itself,
    so its family must be supported whichever engine generates."""
    if trains or DEFAULT_KIND in config.engine.kinds:
        check_supported(model)
    if not trains:
        return
    lora = config.model.lora
    if num_experts_of(model):
        if lora is not None and lora.targets == ALL_LINEAR and config.model.adapter is None:
            raise adapters_on_experts(model.model_type)
        if config.engine.record_routing == AUTO:  # as placement decides later
            engine = config.engine.model_copy(update={"record_routing": "on"})
            config = config.model_copy(update={"engine": engine})
        check_capabilities(config, gpus=gpus)
    elif config.engine.record_routing == "on" and (type(model) is not RawConfig or is_certainly_dense(model)):
        raise UserError(
            f"engine.record_routing=on needs a model with experts, and {config.model.name} has none; "
            "use auto or off"
        )
    if config.trainer.parallel.num_ranks > 1:
        check_ranks(config, model)


def check_ranks(config: PenstockConfig, model: Any) -> None:
    """Refuse ranks that can't split a model with this Hugging Face config. A `RawConfig` lacks its class's plan."""
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
    if parallel.tensor > 1 and type(model) is not RawConfig:
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
