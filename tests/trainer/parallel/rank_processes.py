"""Runs a function on several ranks, each a process of its own. What all processes import is imported once.

They meet over gloo on a CPU, or, with PENSTOCK_RANKS_ON=cuda in the environment, over NCCL with a GPU each.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

RANKS_ON = "PENSTOCK_RANKS_ON"
TIMEOUT_S = 280.0
PRELOADED = ["tests.trainer.parallel.layout_gradients"]


def rank_device(rank: int) -> str:
    return f"cuda:{rank}" if os.environ.get(RANKS_ON) == "cuda" else "cpu"


def on_ranks(size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(rank, folder, *args)` of every rank, by rank. It is a module's function; `folder` is the same for all."""
    if rank_device(0) != "cpu" and size > torch.cuda.device_count():
        pytest.skip(f"{size} ranks need as many GPUs")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(theirs, work, rank, Path(folder), *args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [_result(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _result(pipe: Any) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError("a rank has not answered")
    failure, result = pipe.recv()
    if failure:
        raise AssertionError(failure)
    return result


def _run(pipe: Any, work: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((None, work(*args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
