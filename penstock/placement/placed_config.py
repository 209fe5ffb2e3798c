"""Settles a config before a run starts: its GPUs and their memory are shared out, and nothing in it is `auto`.

adapter ─► GPUs of the machine ─► pools for trainer and engines ─► what is `auto` ─► memory of each GPU
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.config.root import PenstockConfig
from penstock.engines.config import EngineConfig, with_settings
from penstock.engines.kinds import kind_of, settings_of
from penstock.models.expert_count import count_experts
from penstock.placement.automatic import check_transport, resolve_auto, sites_of
from penstock.placement.gpu_pools import resolve_pools
from penstock.placement.gpus import Gpu
from penstock.placement.memory_plan import MemoryPlan, needs_of, plan_memory, ranks_have_room

if TYPE_CHECKING:
    from penstock.models.adapter_check import CheckedAdapter
    from penstock.models.outline import Outline


def resolve_adapter(
    config: PenstockConfig, model: str, *, saved: bool, log: Callable[[str], None]
) -> tuple[PenstockConfig, "CheckedAdapter | None"]:
    """Return the config as the adapter needs it, and the checked adapter. `saved`: a run resumes with its own.

    Does nothing without an adapter, since inspecting a model's layers needs torch, which takes seconds to import.
    """
    if not config.model.trains_adapter:
        return config, None
    from penstock.models.adapter_check import check_adapter

    checked = check_adapter(config.model, model, saved=saved)
    log(str(checked))
    if "learning_rate" not in config.trainer.model_fields_set:
        log(
            f"trainer.learning_rate is {config.trainer.learning_rate:g}, the default for all weights; adapters "
            "usually learn best with about ten times as much"
        )
    updates = {
        "model": config.model.model_copy(update={"lora": checked.lora}),
        "engine": engine_with_adapter(config.engine, checked),
    }
    return config.model_copy(update=updates), checked


def engine_with_adapter(section: EngineConfig, adapter: "CheckedAdapter") -> EngineConfig:
    """Change the settings of every kind of engine so that it serves the adapter."""
    for kind in section.kinds:
        of_kind = section.model_copy(update={"kind": kind})
        changes = kind_of(kind).for_adapter(settings_of(of_kind), adapter.lora, adapter.is_on_head)
        if changes:
            section = with_settings(of_kind, **changes).model_copy(update={"kind": section.kind})
    return section


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Holds a config that names every GPU and leaves nothing to `auto`."""

    config: PenstockConfig
    memory: MemoryPlan | None
    chosen: tuple[str, ...]
    is_on_gpu: bool


def place(
    config: PenstockConfig,
    model: str,
    outline: "Outline | None",
    gpus: tuple[Gpu, ...],
    *,
    longest: int,
    log: Callable[[str], None],
) -> Placed:
    """Share out the GPUs and their memory, and choose what is `auto`.

    `outline` holds the model's sizes, None on a CPU; `longest` is the number of tokens of the longest sequence.
    """
    needs = needs_of(config, outline, gpus, longest=longest) if outline else None
    config, pools = resolve_pools(config, gpus, needs)
    if pools is not None:
        log(str(pools))
    resolved = resolve_auto(
        config,
        gpus,
        num_parameters=outline.num_parameters if outline else 0,
        num_experts=count_experts(model, trust_remote_code=config.model.trust_remote_code),
        has_room=partial(ranks_have_room, outline=outline, gpus=gpus, longest=longest) if outline else None,
    )
    config = resolved.config
    check_transport(config, resolved.sites)
    if resolved.is_logged:
        log(str(resolved))
    memory = plan_memory(config, outline, gpus, longest=longest) if outline else None
    if memory is not None:
        log(str(memory))
    return Placed(
        config=config,
        memory=memory,
        chosen=tuple(choice.setting for choice in resolved.choices),
        is_on_gpu=outline is not None,
    )


def outline_on_gpu(
    config: PenstockConfig, model: str, gpus: Sequence[Gpu], adapter: "CheckedAdapter | None" = None
) -> "Outline | None":
    """Return the model's sizes, or None where the run is on a CPU and does not need them: torch takes seconds to
    import."""
    sites = sites_of(config, gpus)
    if not (sites.trainer.is_gpu or sites.engine.is_gpu):
        return None
    from penstock.models.outline import outline_of

    outline = outline_of(model, trust_remote_code=config.model.trust_remote_code)
    if adapter is None:
        return outline
    return replace(outline, num_adapter_parameters=adapter.num_parameters, is_head_trained=adapter.is_on_head)
