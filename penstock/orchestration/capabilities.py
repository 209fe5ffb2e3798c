"""What a config needs of its engines, against what they say they can do: refused at the start, not at step 50."""

from collections.abc import Sequence

from penstock.errors import UserError
from penstock.orchestration.config import PenstockConfig
from penstock.types import EngineReport


def needed_capabilities(config: PenstockConfig, *, trains: bool = True) -> dict[str, str]:
    """Each capability, and the setting that asks for it. Without `trains`, those of an evaluation."""
    rollout = config.rollout
    needed = {"seed": f"run.seed={config.run.seed}"} | (_of_training(config) if trains else {})
    if config.run.deterministic:
        needed["waves"] = "run.deterministic=true"
    cuts = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for name, off in cuts.items():
        if getattr(rollout, name) != off:
            needed["sampling_mask" if trains else "truncation"] = f"rollout.{name}={getattr(rollout, name)}"
    if rollout.stop:
        needed["stop_strings"] = f"rollout.stop={list(rollout.stop)}"
    if config.eval.tasks is not None and config.eval.temperature == 0:
        needed["greedy"] = "eval.temperature=0"
    return needed


def check_capabilities(
    config: PenstockConfig, reports: Sequence[EngineReport], *, trains: bool = True
) -> None:
    needed = needed_capabilities(config, trains=trains)
    for report in reports:
        lacking = [name for name in needed if name not in report.capabilities]
        if lacking:
            wants = ", ".join(f"{name} (for {needed[name]})" for name in lacking)
            raise UserError(
                f"engine {report.name} lacks {wants}; change the setting, or choose another engine.kind"
            )


def _of_training(config: PenstockConfig) -> dict[str, str]:
    interrupt = config.sync.interrupt
    needed = {
        "logprobs": "training",
        "versions": "training",
        f"interrupt:{interrupt}": f"sync.interrupt={interrupt}",
    }
    if config.sync.selection == "delta":
        needed["delta"] = "sync.selection=delta"
    if config.model.trains_adapter:
        needed["adapters"] = "model.lora"
    if config.engine.record_routing == "on":
        needed["routing"] = "engine.record_routing=on"
    return needed
