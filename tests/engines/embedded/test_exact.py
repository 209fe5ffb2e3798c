"""Greedy tokens are those of `model.generate`, logprobs those of a plain forward, for every family."""

import asyncio
import copy

import pytest
import torch
from torch import nn

from tests.engines.contract import ask, collect, joined
from tests.engines.embedded.tiny import FAMILIES, make_model, serve

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8] * 23]


def generate(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return [int(token) for token in output[0, len(prompt) :]]


def plain_logprobs(model: nn.Module, prompt: list[int], output: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0], dim=-1)
    return table[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family: str) -> None:
    reference = make_model(family)

    async def main() -> None:
        async with serve(copy.deepcopy(reference), prefill_chunk=8) as engine:
            requests = [ask(str(n), p, max_tokens=20 + n, temperature=0.0) for n, p in enumerate(PROMPTS)]
            answers = await asyncio.gather(*(collect(engine.generate(request)) for request in requests))
        for prompt, chunks in zip(PROMPTS, answers, strict=True):
            output = joined(chunks)
            assert output == generate(reference, prompt, len(output))
            logprobs = torch.tensor([float(value) for chunk in chunks for value in chunk.logprobs])
            torch.testing.assert_close(logprobs, plain_logprobs(reference, prompt, output), atol=1e-4, rtol=0)

    asyncio.run(main())
