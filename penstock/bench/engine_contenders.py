"""Runs the contenders of `penstock bench engine`: our engine, and transformers' two ways to serve a batch.

All get the same prompts on the same random weights and sample at temperature 1. Each function returns the seconds
of one run. Except in `run_continuous_call`, what real use sets up only once is set up before the clock starts.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from penstock.engines.config import EngineConfig
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.text_generation import FixedWeights
from penstock.records import GenerateRequest, MaskRef, SamplingMask, SamplingParams
from penstock.records.sampling_masks import fetch_mask

MAX_BATCH_TOKENS = 256
"""For continuous batching; the fastest of 128, 256 and 512 on a CPU."""
MEMORY_PERCENT = 0.3
"""Share of free memory, for the one call that sizes its own cache; its default of 0.9 would only take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Holds prompts (requests, tokens), and how many tokens of each answer are useful."""

    prompts: npt.NDArray[np.int32]
    lengths: tuple[int, ...]

    @property
    def num_useful(self) -> int:
        return sum(self.lengths)


def make_workload(
    vocab_size: int, *, requests: int = 64, prompt_tokens: int = 24, longest: int = 256, seed: int = 0
) -> Workload:
    """Draw log-normal lengths whose p90 is five times their median, scaled so that the longest is `longest`."""
    rng = np.random.default_rng(seed)
    sigma = np.log(5) / 1.2815515655446004
    raw = np.exp(sigma * rng.standard_normal(requests))
    lengths = np.maximum(1, np.rint(longest * raw / raw.max())).astype(int)
    prompts = rng.integers(0, vocab_size, size=(requests, prompt_tokens), dtype=np.int32)
    return Workload(prompts=prompts, lengths=tuple(int(length) for length in lengths))


@dataclass(slots=True)
class EngineRun:
    """Holds one run of our engine: its time, and the masks it recorded."""

    seconds: float
    num_tokens: int
    masks: list[SamplingMask]


def run_engine(
    model: nn.Module,
    workload: Workload,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    record_masks: bool = False,
) -> EngineRun:
    """Send all requests at once to our engine. Its prefix cache is off, since all prompts differ."""
    section = EmbeddedConfig(max_batch=len(workload.lengths), prefix_cache=False, keep_finished=0)
    config = EngineConfig(device=str(_device(model)), embedded=section)
    engine = EmbeddedEngine(model, config=config, receiver=FixedWeights())
    stored: list[MaskRef] = []

    async def ask(number: int) -> int:
        sampling = SamplingParams(
            max_tokens=workload.lengths[number], temperature=temperature, top_p=top_p, seed=number
        )
        request = GenerateRequest(
            id=str(number),
            token_ids=workload.prompts[number],
            sampling=sampling,
            chunk_tokens=64,
            record_sampling_mask=record_masks,
        )
        count = 0
        async for chunk in engine.generate(request):
            count += len(chunk.token_ids)
            if chunk.sampling_mask is not None:
                stored.append(chunk.sampling_mask)
        return count

    async def main() -> tuple[float, int]:
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.run())
            started = time.perf_counter()
            counts = await asyncio.gather(*(ask(number) for number in range(len(workload.lengths))))
            seconds = time.perf_counter() - started
            await engine.close()
        return seconds, sum(counts)

    seconds, num_tokens = asyncio.run(main())
    return EngineRun(seconds, num_tokens, [fetch_mask(engine.blobs, ref) for ref in stored])


def run_generate(model: nn.Module, workload: Workload) -> float:
    """Call transformers' `generate` on one batch, in which every row runs until the longest is done."""
    prompts = torch.from_numpy(workload.prompts).long().to(_device(model))
    config = _sampling(max_new_tokens=max(workload.lengths))
    started = time.perf_counter()
    model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)  # type: ignore[operator]
    return time.perf_counter() - started


def run_continuous(model: nn.Module, workload: Workload) -> float:
    """Use continuous batching that is already running, with a cache sized for the load. Each request ends at its
    own length, and only the time from the first request to the last answer counts."""
    page, longest = 256, workload.prompts.shape[1] + max(workload.lengths)
    sized = ContinuousBatchingConfig(
        num_blocks=len(workload.lengths) * -(-longest // page), max_batch_tokens=MAX_BATCH_TOKENS
    )
    options: dict[str, Any] = {
        "generation_config": _sampling(max_new_tokens=max(workload.lengths)),
        "continuous_batching_config": sized,
        "block": True,
        "timeout": 5,
    }
    with model.continuous_batching_context_manager(**options) as manager:  # type: ignore[operator]
        started = time.perf_counter()
        for number, length in enumerate(workload.lengths):
            manager.add_request(
                workload.prompts[number].tolist(), request_id=str(number), max_new_tokens=length
            )
        missing = len(workload.lengths)
        while missing:
            result = manager.get_result(timeout=1)
            missing -= result is not None and result.is_finished()
        return time.perf_counter() - started


def run_continuous_call(model: nn.Module, workload: Workload) -> float:
    """Use continuous batching in one call, as its documentation shows it: setup included, one length for all."""
    started = time.perf_counter()
    model.generate_batch(  # type: ignore[operator]
        workload.prompts.tolist(),
        generation_config=_sampling(max_new_tokens=max(workload.lengths)),
        continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=MEMORY_PERCENT),
    )
    return time.perf_counter() - started


def _sampling(max_new_tokens: int) -> GenerationConfig:
    """Return settings for plain sampling without an end: id -1 never comes."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
