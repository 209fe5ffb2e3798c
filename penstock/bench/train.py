"""Measures forward and backward of one packed row, against transformers' plain way (`penstock bench train`).

Model FLOPs are 6 · parameters · tokens plus those of causal attention; what checkpointing recomputes is not
counted. The peak is that of forward and backward with weights and float32 gradients; master weights and optimizer
states are reported beside it. `python -m benchmarks train-parts` measures the parts of a whole step.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from penstock.bench.shapes import hardware, make_shape, num_matrix_parameters
from penstock.models.load import resolve_device
from penstock.trainer.config import TrainerConfig
from penstock.trainer.forward.checkpointing import Checkpointing
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.forward.packed_row import PackedRow
from penstock.trainer.optimizers.optimizer import MasterAdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSetting:
    """Holds the setting of one invocation. Defaults depend on whether there is a GPU."""

    shape: str
    device: str
    tokens: int
    """Tokens of one packed row."""
    length: int
    """Tokens of each sequence in it."""
    checkpointing: Checkpointing
    steps: int

    @classmethod
    def of(
        cls,
        shape: str | None,
        tokens: int | None,
        length: int | None,
        *,
        checkpointing: Checkpointing,
        steps: int,
    ) -> "TrainSetting":
        device = resolve_device("auto")
        on_gpu = device != "cpu"
        return cls(
            shape=shape or ("1.5b" if on_gpu else "tiny"),
            device=device,
            tokens=tokens or (16384 if on_gpu else 512),
            length=length or (1024 if on_gpu else 128),
            checkpointing=checkpointing,
            steps=steps,
        )

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def trainer(self) -> TrainerConfig:
        return TrainerConfig(
            dtype="bfloat16" if self.on_gpu else "float32", logprob_chunk_tokens=4096 if self.on_gpu else 256
        )

    def model(self, dtype: torch.dtype) -> Any:
        return make_shape(self.shape, self.device, dtype)

    def packed(self, model: Any, *, compiled: bool) -> PackedModel:
        """Return the trainer's forward pass."""
        return PackedModel(
            model,
            chunk_tokens=self.trainer.logprob_chunk_tokens,
            checkpointing=self.checkpointing,
            compiled=compiled,
        )

    def directions(self) -> torch.Tensor:
        """Return random weights for the row's logprobs in the loss."""
        return torch.randn(self.tokens, device=self.device) / self.tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "tokens": self.tokens,
            "length": self.length,
            "checkpointing": self.checkpointing,
        }


GB = 1e9
WARMUP = 3


def run(
    json_path: Path | None = None,
    *,
    shape: str | None = None,
    tokens: int | None = None,
    length: int | None = None,
    checkpointing: Checkpointing = "selective",
    steps: int = 8,
) -> dict[str, Any]:
    """Measure three arms: transformers' own way, our trainer's, and our trainer's compiled (on a GPU)."""
    setting = TrainSetting.of(shape, tokens, length, checkpointing=checkpointing, steps=steps)
    arms: dict[str, Any] = {}
    arms["transformers"] = plain_arm(setting)
    arms["penstock"] = packed_arm(setting, compiled=False)
    if setting.on_gpu:
        arms["penstock, compiled"] = packed_arm(setting, compiled=True)
    best = arms[max((name for name in arms if name != "transformers"), key=lambda name: arms[name]["tflops"])]
    report = {
        "headline": {"tflops": best["tflops"], "peak_gb": best["peak_gb"]},
        "hardware": hardware(setting.device),
        "setting": setting.as_dict(),
        "matmul_tflops": matmul_ceiling(setting.device),
        "arms": arms,
    }
    Console().print(table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def packed_arm(setting: TrainSetting, *, compiled: bool) -> dict[str, Any]:
    """Measure our trainer's path: packed attention, the chunked head, float32 gradients and master weights."""
    clean(setting.device)
    model = setting.model(torch.float32)
    optimizer = MasterAdamW(model, setting.trainer)
    policy = setting.packed(model, compiled=compiled)
    row = make_row(model.config.vocab_size, setting.tokens, setting.length, setting.device)
    directions = setting.directions()

    def step() -> None:
        (policy(row).logprobs * directions).sum().backward()  # type: ignore[no-untyped-call]

    def update() -> None:
        optimizer.update(1e-6, optimizer.gradient_norm())

    step()
    update()
    result = measure(model, step, optimizer.forget, setting)
    step()
    result["optimizer_ms"] = min(timed(update, setting.device, before=step) for _ in range(3))
    states = 3 * 4 * sum(parameter.numel() for parameter in model.parameters()) if setting.on_gpu else 0
    result["peak_with_optimizer_gb"] = result["peak_gb"]
    result["peak_gb"] = max(0.0, result["peak_gb"] - states / GB)
    result["optimizer_gb"] = states / GB
    return result


def plain_arm(setting: TrainSetting) -> dict[str, Any]:
    """Measure transformers' forward with its gradient checkpointing, full logits and a log-softmax over them."""
    clean(setting.device)
    model = setting.model(setting.dtype)
    length = setting.length
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    rows = setting.tokens // length
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=setting.device)

    def step() -> None:
        logprobs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        logprobs[:, :-1].gather(2, ids[:, 1:, None]).mean().neg().backward()

    def forget() -> None:
        model.zero_grad(set_to_none=True)

    return measure(model, step, forget, setting)


def clean(device: str) -> None:
    """Free what an earlier arm left behind, so that this arm's peak does not count it."""
    torch._dynamo.reset()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def measure(
    model: Any, step: Callable[[], None], forget: Callable[[], None], setting: TrainSetting
) -> dict[str, Any]:
    """Measure the speed and the peak memory of `step`, which trains on one row of the setting."""
    found = time_steps(step, forget, setting.device, setting.steps)
    flops = model_flops(model, setting.tokens, setting.length)
    return {
        **found,
        "tflops": flops / found["ms"] / 1e9,
        "tokens_per_s": setting.tokens / found["ms"] * 1e3,
    }


def time_steps(
    step: Callable[[], None], forget: Callable[[], None], device: str, steps: int
) -> dict[str, float]:
    """Return the median time and the peak memory of `step`. Each run starts without gradients."""
    forget()
    for _ in range(WARMUP):
        step()
        forget()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = [timed(step, device, before=forget) for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() if device != "cpu" else 0
    forget()
    return {
        "ms": statistics.median(times),
        "spread_ms": max(times) - min(times),
        "peak_gb": peak / GB,
    }


def timed(function: Callable[[], None], device: str, before: Callable[[], None]) -> float:
    """Return the milliseconds that `function` takes, its device work included."""
    before()
    if device == "cpu":
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def make_row(vocabulary: int, tokens: int, length: int, device: str) -> PackedRow:
    """Make sequences of equal length in which every token is in the loss."""
    count = tokens // length
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (tokens + 1,), generator=draw).to(device)
    zeros = torch.zeros(tokens, device=device)
    return PackedRow(
        sequences=(),
        input_ids=ids[None, :-1],
        position_ids=torch.arange(length, device=device).repeat(count)[None],
        lengths=(length,) * count,
        rows=torch.arange(tokens, device=device),
        targets=ids[1:],
        temperature=torch.ones(tokens, device=device),
        behaviour_logprobs=zeros,
        segments=torch.arange(count, device=device).repeat_interleave(length),
        counts=(length,) * count,
        positions=(),
        kept=None,
    )


def model_flops(model: Any, tokens: int, length: int) -> float:
    """Return the FLOPs of forward and backward: 6 per parameter and token, and causal attention's two matmuls."""
    config = model.config
    width = config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
    attention = 6.0 * config.num_hidden_layers * width * tokens * length
    return float(6.0 * num_matrix_parameters(model) * tokens + attention)


def matmul_ceiling(device: str, size: int = 8192) -> float:
    """Measure the TFLOP/s of a large matmul on random data, the most that this GPU reaches in practice."""
    if device == "cpu":
        size = 512
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        torch.mm(left, right)

    times = [timed(multiply, device, before=_nothing) for _ in range(10)]
    return 2.0 * size**3 / statistics.median(times) / 1e9


def _nothing() -> None:
    pass


def table(report: dict[str, Any]) -> Table:
    setting = report["setting"]
    title = f"{setting['shape']}, {setting['tokens']} tokens, {report['hardware']['device']}"
    shown = Table(
        "arm", "ms", "model TFLOP/s", "of ceiling", "tokens/s", "peak GB", "with optimizer", title=title
    )
    for name, arm in report["arms"].items():
        shown.add_row(
            name,
            f"{arm['ms']:.1f}",
            f"{arm['tflops']:.4g}",
            f"{arm['tflops'] / report['matmul_tflops']:.0%}",
            f"{arm['tokens_per_s']:,.0f}",
            f"{arm['peak_gb']:.1f}",
            f"{arm['peak_with_optimizer_gb']:.1f}" if "peak_with_optimizer_gb" in arm else "",
        )
    return shown
