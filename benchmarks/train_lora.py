"""`python -m benchmarks lora`: whole steps of an adapter (forward, backward, update), beside all weights.

The peak is that of everything: weights, the adapter's gradients, masters and AdamW's states, activations. FLOPs are
not counted: a frozen weight has no gradient, so six a parameter would be too many.
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.bench.shapes import hardware
from penstock.bench.train import GB, TrainSetting, clean, make_row, measure, packed_arm
from penstock.models.config import LoraConfig
from penstock.trainer.adapter import TrainedAdapter
from penstock.trainer.forward.checkpointing import Checkpointing
from penstock.trainer.optimizers.optimizer import MasterAdamW

FULL = "all weights"


def run(
    json_path: Path | None = None,
    *,
    rank: int,
    shape: str | None = None,
    tokens: int | None = None,
    length: int | None = None,
    checkpointing: Checkpointing = "full",
    steps: int = 8,
) -> dict[str, Any]:
    """An adapter on all linear layers, and compiled (on a GPU); then all weights in the same setting."""
    setting = TrainSetting.of(shape, tokens, length, checkpointing=checkpointing, steps=steps)
    lora = LoraConfig(rank=rank)
    arms: dict[str, Any] = {"lora": lora_arm(setting, lora, compiled=False)}
    if setting.on_gpu:
        arms["lora, compiled"] = lora_arm(setting, lora, compiled=True)
    best = max(arms.values(), key=lambda arm: float(arm["tokens_per_s"]))
    arms[FULL] = full_arm(setting)
    report = {
        "headline": {"lora_tokens_per_s": best["tokens_per_s"], "lora_peak_gb": best["peak_gb"]},
        "hardware": hardware(setting.device),
        "setting": {**setting.as_dict(), "rank": rank},
        "arms": arms,
    }
    Console().print(table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def lora_arm(setting: TrainSetting, lora: LoraConfig, *, compiled: bool) -> dict[str, Any]:
    """Steps of one packed row each. Weights that stay are held as they compute, as in a run."""
    clean(setting.device)
    model = setting.model(setting.dtype)
    adapter = TrainedAdapter(model, lora, base=setting.shape)
    optimizer = MasterAdamW(model, setting.trainer)
    policy = setting.packed(model, compiled=compiled)
    row = make_row(model.config.vocab_size, setting.tokens, setting.length, setting.device)
    directions = setting.directions()

    def step() -> None:
        (policy(row).logprobs * directions).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.update(1e-6, optimizer.gradient_norm())

    result = measure(model, step, optimizer.forget, setting)
    del result["tflops"]
    trained = sum(tensor.numel() for tensor in adapter.tensors().values())
    return {**result, "parameters": trained, "states_gb": 16 * trained / GB if setting.on_gpu else 0.0}


def full_arm(setting: TrainSetting) -> dict[str, Any]:
    """All weights, compiled where there is a GPU; the update is counted too."""
    found = packed_arm(setting, compiled=setting.on_gpu)
    milliseconds = found["ms"] + found["optimizer_ms"]
    return {
        "ms": milliseconds,
        "spread_ms": found["spread_ms"],
        "tokens_per_s": setting.tokens / milliseconds * 1e3,
        "peak_gb": found["peak_with_optimizer_gb"],
    }


def table(report: dict[str, Any]) -> Table:
    setting = report["setting"]
    title = (
        f"{setting['shape']}, rank {setting['rank']}, a step of {setting['tokens']:,} tokens, "
        f"checkpointing {setting['checkpointing']}, {report['hardware']['device']}"
    )
    shown = Table("trained", "ms", "tokens/s", "peak GB, with optimizer", "parameters", title=title)
    for name, arm in report["arms"].items():
        shown.add_row(
            name,
            f"{arm['ms']:.1f}",
            f"{arm['tokens_per_s']:,.0f}",
            f"{arm['peak_gb']:.1f}",
            f"{arm['parameters']:,}" if "parameters" in arm else "all",
        )
    return shown
