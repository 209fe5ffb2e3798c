"""`python -m benchmarks one-gpu`: synchronous against asynchronous training on one GPU, with answers of
long-tailed length.

An ordinary session with real workers, and random weights of this shape. A random model hardly ever ends an answer
by itself, so each answer is told its length: log-normal, p90 five times the median. The length depends on the group
and the episode alone, so both arms generate and train the same number of tokens.
"""

import asyncio
import json
import math
import os
import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.api import cache_folder
from penstock.bench.loop_settings import ARMS, P90_OVER_MEDIAN, arm_of, sentence
from penstock.bench.saved_report import SavedReport
from penstock.bench.shapes import SHAPES, save_shape
from penstock.bench.workload import make_tasks
from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.demo.latency import Z_90
from penstock.errors import ConfigError
from penstock.observe.readers import show
from penstock.observe.views import SilentView
from penstock.placement.gpus import find_gpus
from penstock.records import Task, Turn
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.run.preflight import prepare
from penstock.run.run import Run
from penstock.run.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeWork:
    """What both arms do."""

    shape: str
    device: str
    steps: int
    groups: int
    group_size: int
    prompt_tokens: int
    median_tokens: int
    """Of an answer."""
    max_tokens: int

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


def work_of(shape: str, *, on_gpu: bool, quick: bool = False) -> ShapeWork:
    """On a CPU only `tiny` is small enough: it shows that the bench works, not what a GPU gains."""
    if shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    if on_gpu:
        return ShapeWork(
            shape=shape,
            device="cuda",
            steps=4 if quick else 8,
            groups=32,
            group_size=8,
            prompt_tokens=64,
            median_tokens=128,
            max_tokens=1024,
        )
    if shape != "tiny":
        raise ConfigError(f"--shape {shape} needs a GPU, and there is none; --shape tiny runs on a CPU")
    return ShapeWork(
        shape=shape,
        device="cpu",
        steps=3 if quick else 6,
        groups=4,
        group_size=4,
        prompt_tokens=8,
        median_tokens=12,
        max_tokens=96,
    )


class LongTailedAnswers:
    """A single turn of an imposed length."""

    def __init__(self, work: ShapeWork) -> None:
        self._work = work

    async def run(self, task: Task, rollout: Rollout) -> Turn:
        return await rollout.generate(task.prompt, max_tokens=self.length(rollout.spec), stop_token_ids=())

    def length(self, spec: EpisodeSpec) -> int:
        """The same for the same episode in every run."""
        sigma = math.log(P90_OVER_MEDIAN) / Z_90
        drawn = self._work.median_tokens * math.exp(sigma * random.Random(spec.name).gauss(0.0, 1.0))
        return max(1, min(self._work.max_tokens, round(drawn)))


def run(work: ShapeWork, report: SavedReport, console: Console) -> None:
    """Both arms, each saved and printed as it ends."""
    gpus = find_gpus(os.environ)
    report.put("hardware", value=[gpu.name for gpu in gpus] if work.on_gpu else ["CPU"])
    report.put("work", value=asdict(work))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        folder = Path(scratch)
        console.print(f"making a random model of shape {work.shape} …", highlight=False, soft_wrap=True)
        make_model(work, folder / "model")
        for name, max_staleness in ARMS.items():
            arm = train(work, max_staleness, folder, console)
            report.put(name, value=arm)
            trained = f"{arm['trained_tokens_per_s']:,.0f} trained tok/s"
            console.print(
                f"{work.shape}, {name}: {sentence(arm)}; {trained}", highlight=False, soft_wrap=True
            )
    finish(report, console)


def finish(report: SavedReport, console: Console) -> None:
    synchronous, asynchronous = report.data["synchronous"], report.data["asynchronous"]
    speedup = asynchronous["steps_per_s"] / synchronous["steps_per_s"]
    report.headline(
        {
            "shape_speedup": speedup,
            "shape_trainer_waited": asynchronous["trainer_waited"],
            "shape_engine_worked": asynchronous["engine_worked"],
        }
    )
    console.print(f"asynchronous is {speedup:.2f} times as fast", highlight=False, soft_wrap=True)


def make_model(work: ShapeWork, folder: Path) -> None:
    """On a GPU in a process of its own: a CUDA context in this one would lie beside those of the workers."""
    if not work.on_gpu:
        save_shape(work.shape, folder, work.device)
        return
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(save_shape, work.shape, folder, work.device).result()


def train(work: ShapeWork, max_staleness: int, folder: Path, console: Console) -> dict[str, Any]:
    prepared = prepare(
        build(PenstockConfig, settings(work, max_staleness, folder)),
        tasks=make_tasks(256, work.prompt_tokens),
        log=lambda line: console.print(line, highlight=False, markup=False),
        cache=cache_folder(),
        gpus=find_gpus(os.environ) if work.on_gpu else (),
        workflow=LongTailedAnswers(work),
    )
    summary = asyncio.run(Run(prepared, show(SilentView())).run())
    return arm_of(summary) | trained_tokens(prepared.folder / "metrics.jsonl", summary)


def trained_tokens(metrics: Path, summary: Summary) -> dict[str, float]:
    """Tokens of answers that were trained: those of groups that were dropped are generated for nothing."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    means = [row["answer_tokens_mean"] for row in rows if "answer_tokens_mean" in row]
    mean = sum(means) / len(means)
    return {
        "answer_tokens_mean": mean,
        "trained_tokens_per_s": mean * summary.samples / summary.training_s,
        "sync_stall_s": summary.sync_stall_s,
    }


def settings(work: ShapeWork, max_staleness: int, folder: Path) -> dict[str, Any]:
    """The recipe of `examples/one_gpu`; on a CPU in float32 and not compiled."""
    on_gpu = work.on_gpu
    dtype = "bfloat16" if on_gpu else "float32"
    return {
        "model": {"name": str(folder / "model"), "device": work.device},
        "tasks": {"source": "rows"},
        "reward": {"functions": ["penstock.bench.workload:share_of_even_tokens"]},
        "engine": {
            "dtype": dtype,
            "max_context": work.prompt_tokens + work.max_tokens,
            "embedded": {"max_batch": 512 if on_gpu else 64, "compile": "on" if on_gpu else "off"},
        },
        "rollout": {
            "group_size": work.group_size,
            "groups_per_step": work.groups,
            "max_new_tokens": work.max_tokens,
        },
        "staleness": {"max_staleness": max_staleness},
        "trainer": {
            "dtype": dtype,
            "learning_rate": 1e-6,
            "checkpointing": "selective" if on_gpu else "off",
            "compile": on_gpu,
            "micro_batch_tokens": 16384,
            "logprob_chunk_tokens": 4096,
        },
        "sync": {"transport": "cuda_ipc" if on_gpu else "shared_memory"},
        "run": {"name": f"loop-{max_staleness}", "steps": work.steps, "folder": str(folder)},
    }
