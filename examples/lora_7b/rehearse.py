"""The recipe with random weights: what it takes of a GPU, and how fast it is. Nothing is downloaded.

    python examples/lora_7b/rehearse.py

A random model hardly ever ends an answer, so all answers have `rollout.max_new_tokens`. It learns nothing either:
the reward is a coin that the answer tosses.
"""

import argparse
import json
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

import penstock
from penstock.bench.shapes import SHAPES, save_shape
from penstock.placement.gpus import find_gpus

CONFIG = Path(__file__).parent / "config.yaml"
ON_CPU = {
    "model": {"device": "cpu", "lora": {"rank": 4}},
    "engine": {"max_context": 128, "embedded": {"max_batch": 16}},
    "rollout": {"group_size": 2, "groups_per_step": 2, "max_new_tokens": 8},
    "trainer": {"micro_batch_tokens": 256, "warmup_steps": 0},
}
"""Small enough to see that it works where there is no GPU."""
LOOK_EVERY_S = 0.5


def coin(task: Any, completion: str) -> float:
    """Half of all answers, whatever they say."""
    return float(zlib.crc32(f"{task.prompt} {completion}".encode()) % 2)


def settings(model: Path, steps: int, folder: Path, *, on_gpu: bool) -> dict[str, Any]:
    """The recipe's own, but for what needs a real model and its data."""
    config = yaml.safe_load(CONFIG.read_text())
    for name, section in {} if on_gpu else ON_CPU.items():
        config[name] = {**config[name], **section}
    config["model"] |= {"name": str(model)}
    config["run"] |= {"name": "rehearsal", "folder": str(folder), "steps": steps, "checkpoint_every": 0}
    for section in ("tasks", "reward"):
        del config[section]
    return config


def make_model(shape: str, folder: Path, *, on_gpu: bool) -> None:
    """In a process of its own, so that this one takes no memory of the GPU."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(save_shape, shape, folder, "cuda" if on_gpu else "cpu").result()


@contextmanager
def watched_memory() -> Iterator[dict[str, int]]:
    """The largest memory that the GPU had in use, in bytes, as nvidia-smi tells."""
    seen = {"peak": 0}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            for gpu in find_gpus(os.environ)[:1]:
                seen["peak"] = max(seen["peak"], gpu.total_bytes - gpu.free_bytes)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield seen
    finally:
        over.set()
        watching.join()


def rehearse(shape: str, steps: int, folder: Path) -> dict[str, Any]:
    on_gpu = bool(find_gpus(os.environ))
    make_model(shape, folder / "model", on_gpu=on_gpu)
    rows = [{"prompt": f"{number:04d}" * 16} for number in range(512 if on_gpu else 16)]
    config = settings(folder / "model", steps, folder / "runs", on_gpu=on_gpu)
    with watched_memory() as memory:
        summary = penstock.train(config, tasks={"rows": rows, "as_chat": False}, reward=coin)
    lines = (Path(summary.folder) / "metrics.jsonl").read_text().splitlines()
    trained = [row for row in map(json.loads, lines) if "step_s" in row][
        1:
    ]  # the first one waits for the engine
    adapter = Path(summary.folder) / "model" / "adapter_model.safetensors"
    return {
        "shape": shape,
        "steps": summary.steps,
        "gpu_peak_gb": memory["peak"] / 1e9,
        "generated_tokens_per_s": summary.tokens_per_s,
        "trained_answer_tokens_per_s": summary.samples
        * config["rollout"]["max_new_tokens"]
        / summary.training_s,
        "step_s": sum(row["step_s"] for row in trained) / max(1, len(trained)),
        "trainer_waited": summary.trainer_time["waited"],
        "engine_worked": summary.engine_time["worked"],
        "stall_ms": summary.sync_stall_s * 1e3,
        "adapter_mb": adapter.stat().st_size / 1e6,
        "logprob_gap_mean": max((row.get("logprob_gap_mean", 0.0) for row in trained), default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="7b", choices=sorted(SHAPES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where the random model goes (15 GB); else a temporary one"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="penstock-lora-"))
    try:
        report = rehearse(arguments.shape, arguments.steps, folder)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    for name, value in report.items():
        print(f"{name:24} {value:,.3f}" if isinstance(value, float) else f"{name:24} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
