"""What a config needs of its engines, against what their kinds can do: refused before anything starts."""

from collections.abc import Collection, Mapping, Sequence

from penstock.engines.kinds import kind_of, settings_of
from penstock.errors import UserError
from penstock.orchestration.config import PenstockConfig

INTERRUPT = "interrupt:"


def needed_capabilities(config: PenstockConfig, *, trains: bool = True) -> dict[str, str]:
    """Each capability, and the setting that asks for it. Without `trains`, those of an evaluation."""
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


def check_capabilities(config: PenstockConfig, *, trains: bool = True) -> None:
    """Refuse a config that needs what engines of one of its kinds can't do."""
    needed = needed_capabilities(config, trains=trains)
    lora = config.model.lora if trains and config.model.trains_adapter else None
    for member in {member.kind: member for member in config.engine.members}.values():
        settings_of(member)  # of a kind by path they are checked here
        can = kind_of(member.kind).can(member, lora)
        beside = ["model.lora"] * (lora is not None) + ["engine.record_routing=on"] * ("routing" in needed)
        _check_kind(member.kind, needed, can, beside)


def _check_kind(kind: str, needed: Mapping[str, str], can: Collection[str], beside: Sequence[str]) -> None:
    """`beside` are settings that an engine's interrupts depend on."""
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
        raise UserError(
            f"engine.kind={kind} lacks {wants}; change the setting, or choose another engine.kind"
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
