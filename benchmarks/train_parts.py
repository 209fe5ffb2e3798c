"""`python -m benchmarks train-parts` measures whole steps from plan to update, groups whose prompt is run once, and
each way to hold the optimizer's states."""

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.train_steps import ON_CPU, ON_GPU, steps_arm
from penstock.bench.shapes import hardware, make_shape
from penstock.bench.train import GB, clean, make_row, time_steps, timed
from penstock.models.load import resolve_device
from penstock.records import TrainSequence, sample_of_turn
from penstock.trainer.config import OptimizerStates, TrainerConfig
from penstock.trainer.forward.dummy_batch import dummy_turn
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.forward.packed_row import PackedRow
from penstock.trainer.optimizers.optimizer import MasterAdamW

OPTIMIZER_STATES: tuple[OptimizerStates, ...] = ("float32", "8bit", "cpu")
GROUPS, MEMBERS = 2, 8
"""Of the comparison with prompts that are run once."""


def run(
    json_path: Path | None = None, *, shape: str | None = None, length: int | None = None, steps: int = 8
) -> dict[str, Any]:
    """All three, a table, and JSON."""
    device = resolve_device("auto")
    on_gpu = device != "cpu"
    shape, length = shape or ("1.5b" if on_gpu else "tiny"), length or (1024 if on_gpu else 128)
    groups = groups_arm(shape, device, length // 2, compiled=on_gpu, steps=steps)
    whole = whole_steps(shape, device, steps=3)
    report = {
        "headline": {
            "step_tokens_per_s": whole["tokens_per_s"],
            "shared_prompt_gain": groups["separate_ms"] / groups["shared_ms"],
        },
        "hardware": hardware(device),
        "setting": {"shape": shape, "length": length},
        "groups": groups,
        "optimizer_states": {name: states_arm(shape, device, length, name) for name in OPTIMIZER_STATES},
        "whole_steps": whole,
    }
    Console().print(table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def whole_steps(shape: str, device: str, steps: int) -> dict[str, float]:
    """Steps as a run makes them, compiled where there is a GPU."""
    clean(device)
    on_gpu = device != "cpu"
    return steps_arm(shape, device, compiled=on_gpu, steps=steps, load=ON_GPU if on_gpu else ON_CPU)


def states_arm(shape: str, device: str, length: int, states: OptimizerStates) -> dict[str, float]:
    """One update with the optimizer's states held in this way, and what the device then holds."""
    clean(device)
    on_gpu = device != "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if on_gpu else "float32"
    config = TrainerConfig(dtype=dtype, optimizer_states=states, compile="on" if on_gpu else "off")
    model: Any = make_shape(shape, device, torch.float32)
    optimizer = MasterAdamW(model, config)
    policy = PackedModel(model, chunk_tokens=length, checkpointing="selective")
    row = make_row(model.config.vocab_size, length, length, device)

    step = partial(_backward, policy, row)

    def update() -> None:
        optimizer.update(1e-6, optimizer.gradient_norm())

    times = [timed(update, device, before=step) for _ in range(4)]
    held = torch.cuda.memory_allocated() if on_gpu else 0
    return {"ms": statistics.median(times[1:]), "held_gb": held / GB}


def groups_arm(shape: str, device: str, length: int, *, compiled: bool, steps: int) -> dict[str, float]:
    """Forward and backward of groups whose members share a prompt as long as their answers: every sequence on its
    own, and each prompt once."""
    clean(device)
    config = TrainerConfig(dtype="bfloat16" if device != "cpu" else "float32")
    model: Any = make_shape(shape, device, torch.float32)
    optimizer = MasterAdamW(model, config)
    policy = PackedModel(model, chunk_tokens=4096, checkpointing="selective", compiled=compiled)
    sequences = make_groups(model.config.vocab_size, length)
    result: dict[str, float] = {}
    logprobs = []
    for name, shared in (("separate", False), ("shared", True)):
        row = PackedRow.of(sequences, torch.device(device), shared_prompts=shared)
        assert row is not None  # every sequence has an answer

        step = partial(_backward, policy, row)
        measured = time_steps(step, optimizer.forget, device, steps)
        with torch.no_grad():
            logprobs.append(policy(row).logprobs)
        result |= {f"{name}_ms": measured["ms"], f"{name}_tokens": float(row.input_ids.shape[1])}
    return {**result, "largest_difference": float((logprobs[0] - logprobs[1]).abs().max())}


def _backward(policy: PackedModel, row: PackedRow) -> None:
    policy(row).logprobs.mean().backward()  # type: ignore[no-untyped-call]


def make_groups(vocabulary: int, length: int) -> list[TrainSequence]:
    """Prompts and answers of `length` random tokens; members of a group share the prompt."""
    draw = np.random.default_rng(0)
    sequences = []
    for group in range(GROUPS):
        prompt = draw.integers(0, vocabulary, length)
        for episode in range(MEMBERS):
            turn = dummy_turn(prompt, draw.integers(0, vocabulary, length), vocabulary)
            sequences.append(TrainSequence(sample=sample_of_turn(turn), group=group, episode=episode))
    return sequences


def table(report: dict[str, Any]) -> Table:
    groups, whole = report["groups"], report["whole_steps"]
    shown = Table("", "ms", "", title="whole steps, shared prompts, and one optimizer update")
    shown.add_row(
        f"a step of {whole['micro_batches']:.0f} micro-batches, answers of all lengths",
        f"{whole['ms']:.1f}",
        f"{whole['tokens']:,.0f} tokens, {whole['tokens_per_s']:,.0f} a second",
    )
    for name in ("separate", "shared"):
        prompts = (
            f"{GROUPS} groups of {MEMBERS}, prompts {'once' if name == 'shared' else 'with every answer'}"
        )
        shown.add_row(prompts, f"{groups[f'{name}_ms']:.1f}", f"{groups[f'{name}_tokens']:,.0f} tokens")
    for name, arm in report["optimizer_states"].items():
        shown.add_row(f"update, states {name}", f"{arm['ms']:.1f}", f"{arm['held_gb']:.1f} GB held")
    return shown
