"""What an engine that declares a capability must do. `CapabilityContract` tests each that an engine declares, against
plain forward passes, and fails for one that nobody tests."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from penstock.records import Chunk, SamplingParams
from penstock.records.interfaces import Engine
from tests.engines.contract import ask, collect, joined

PROMPT = [1, 10, 2, 11]
ELSEWHERE = {
    "versions": "EngineContract",
    "forks": "tests/engines/embedded/test_scheduler.py",
    "exact_resume": "EngineContract",
    "delta": "tests/sync",
    "shards": "tests/trainer/parallel",
    "dora": "tests/engines/embedded/adapters",
    "merged_adapters": "tests/engines/embedded/adapters",
    "waves": "tests/engines/embedded/test_waiting_line.py",
    "adapters": "tests/engines/embedded/adapters, tests/vllm_live/test_live_adapters.py",
    "sampling_mask": "tests/engines/embedded/test_engine.py",
    "routing": "tests/engines/embedded/test_route_store.py, tests/engines/vllm/test_vllm_engine.py",
    "interrupt:inflight": "tests/engines/embedded/test_swaps.py, tests/vllm_live/test_live_weights.py",
    "interrupt:inflight_recompute": "the same",
    "interrupt:drain": "the same",
    "interrupt:abort_resume": "the same",
    "interrupt:abort_retry": "the same",
}
"""Capabilities that need weights or an engine's own parts, and who tests them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a scene works with: an engine, the model that it serves, and the text of its tokens."""

    engine: Engine
    model: nn.Module
    decode: Callable[[list[int]], str]

    async def answer(self, name: str, prompt: list[int] = PROMPT, **options: Any) -> list[Chunk]:
        return await collect(self.engine.generate(ask(name, prompt=prompt, **options)))

    async def check(self, name: str, **options: Any) -> list[int]:
        """Every token's logprob is that of the distribution which a plain forward pass and the sampling give."""
        chunks = await self.answer(name, **options)
        tokens = joined(chunks)
        got = [float(each) for chunk in chunks for each in chunk.logprobs]
        wanted = expected_logprobs(self.model, PROMPT, tokens, ask(name, prompt=PROMPT, **options).sampling)
        assert got == pytest.approx(wanted, abs=1e-3)
        return tokens


def expected_logprobs(
    model: nn.Module, prompt: list[int], tokens: list[int], sampling: SamplingParams
) -> list[float]:
    """Token by token: bias, penalties, temperature, truncation."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0].double()
    found = []
    for place, token in enumerate(tokens):
        row = shaped(logits[len(prompt) + place - 1].clone(), prompt, tokens[:place], sampling)
        found.append(float(torch.log_softmax(row, dim=-1)[token]))
    return found


def shaped(row: torch.Tensor, prompt: list[int], output: list[int], sampling: SamplingParams) -> torch.Tensor:
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    for token in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        row[token] = row[token] * penalty if row[token] < 0 else row[token] / penalty
    for token in set(output):
        row[token] -= sampling.presence_penalty
    row = row / sampling.temperature
    probs, order = torch.softmax(row, dim=-1).sort(descending=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if sampling.top_k:
        keep[sampling.top_k :] = False
    keep &= probs.cumsum(0) - probs < sampling.top_p
    keep &= probs >= sampling.min_p * probs[0]
    row[order[~keep]] = -torch.inf
    return row


async def logprobs(stage: Stage) -> None:
    await stage.check("a", max_tokens=20, seed=1)
    await stage.check("b", max_tokens=20, seed=2, temperature=0.7)


async def greedy(stage: Stage) -> None:
    tokens = joined(await stage.answer("a", max_tokens=12, temperature=0.0))
    with torch.inference_mode():
        rows = stage.model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert tokens == rows.argmax(dim=-1).tolist()


async def seed(stage: Stage) -> None:
    first, again, other = [
        joined(await stage.answer(name, max_tokens=30, seed=number))
        for name, number in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert first == again
    assert first != other


async def truncation(stage: Stage) -> None:
    for name, cut in (("k", {"top_k": 2}), ("p", {"top_p": 0.6}), ("m", {"min_p": 0.4})):
        await stage.check(name, max_tokens=20, seed=3, temperature=1.3, **cut)


async def penalties(stage: Stage) -> None:
    await stage.check("r", max_tokens=20, seed=4, repetition_penalty=1.5)
    await stage.check("p", max_tokens=20, seed=4, presence_penalty=0.8)


async def logit_bias(stage: Stage) -> None:
    await stage.check("a", max_tokens=20, seed=5, logit_bias={3: 2.0, 7: -1.5})
    assert await stage.check("b", max_tokens=5, seed=5, logit_bias={3: 60.0}) == [3] * 5


async def min_tokens(stage: Stage) -> None:
    wants_to_end = {"stop_token_ids": (5,), "logit_bias": {5: 60.0}, "max_tokens": 12}
    assert joined(await stage.answer("a", **wants_to_end)) == [5]
    tokens = joined(await stage.answer("b", **wants_to_end, min_tokens=6))
    assert len(tokens) == 7
    assert tokens.index(5) == 6


async def stop_strings(stage: Stage) -> None:
    free = joined(await stage.answer("a", max_tokens=30, seed=6))
    stop = next(text for place in range(4, 28) if (text := stage.decode(free[place : place + 2])).strip())
    end = next(place for place in range(1, 31) if stop in stage.decode(free[:place]))
    chunks = await stage.answer("b", max_tokens=30, seed=6, stop=(stop,))
    assert joined(chunks) == free[:end]
    assert chunks[-1].finish_reason == "stop"


async def prefix_cache(stage: Stage) -> None:
    """What is read from the cache is what was computed for the same weights."""
    prompt = [1 + place % 9 for place in range(40)]
    first, again = [
        await stage.answer(name, prompt=prompt, max_tokens=16, temperature=0.0) for name in ("a", "b")
    ]
    assert joined(first) == joined(again)
    got = [float(each) for chunk in again for each in chunk.logprobs]
    assert got == pytest.approx([float(each) for chunk in first for each in chunk.logprobs], abs=1e-4)


async def priority(stage: Stage) -> None:
    """A request of any priority is served, and one among others."""
    answers = await asyncio.gather(
        *(stage.answer(f"r{number}", max_tokens=4, priority=3 - number) for number in range(4))
    )
    assert [len(joined(chunks)) for chunks in answers] == [4] * 4


SCENES: dict[str, Callable[[Stage], Awaitable[None]]] = {
    scene.__name__: scene
    for scene in (
        *(logprobs, greedy, seed, truncation, penalties, logit_bias, min_tokens),
        *(stop_strings, prefix_cache, priority),
    )
}


class CapabilityContract:
    """Subclasses give `open_stage()`: an engine whose context holds 64 tokens. Its answers never end by themselves."""

    def open_stage(self) -> AbstractAsyncContextManager[Stage]:
        raise NotImplementedError

    def play_stage(self, scene: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), self.open_stage() as stage:
                await scene(stage)

        asyncio.run(main())

    @pytest.mark.parametrize("name", SCENES)
    def test_does_what_it_declares(self, name: str) -> None:
        async def scene(stage: Stage) -> None:
            if name in (await stage.engine.report()).capabilities:
                await SCENES[name](stage)

        self.play_stage(scene)

    def test_declares_nothing_that_nobody_tests(self) -> None:
        async def scene(stage: Stage) -> None:
            assert set((await stage.engine.report()).capabilities) - set(SCENES) - set(ELSEWHERE) == set()

        self.play_stage(scene)
