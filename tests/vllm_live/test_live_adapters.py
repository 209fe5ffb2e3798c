"""Adapters on a real server: what it samples is what the model with that adapter gives."""

from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from penstock.models.config import LoraConfig
from penstock.sync.shared_memory import SharedMemoryPublisher
from penstock.sync.slot_publisher import Publishing
from penstock.trainer.adapter import TrainedAdapter
from tests.engines.contract import ask, play
from tests.vllm_live.live import (
    ADAPTER_RANK,
    CONTEXT,
    LONG,
    PROMPT,
    check_answer,
    column,
    forward_logprobs,
    load,
    opened,
    parts_of,
)

LORA = LoraConfig(rank=ADAPTER_RANK, alpha=8.0)


def redraw(adapter: TrainedAdapter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in adapter.tensors().values():
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))


@pytest.mark.timeout(600)
def test_adapters_are_swapped_under_running_answers(adapter_server: str, model: str, tmp_path: Path) -> None:
    async def scene() -> None:
        live = load(model)
        adapter = TrainedAdapter(live, LORA, base=model)
        below = adapter.base_tensors()
        base = SharedMemoryPublisher(below, Publishing(), folder=tmp_path)
        own = SharedMemoryPublisher(
            adapter.tensors(),
            Publishing(selection="adapter", base=1, adapter=adapter.spec, slots=8),
            folder=tmp_path,
        )
        async with opened(parts_of(model, urls=(adapter_server,), lora=LORA, context=CONTEXT)) as engine:
            base.snapshot(1, below)
            assert (await engine.update(base.describe(1), "drain")).version == 1
            await check_answer(engine, load(model), 1)
            for version in (2, 3):
                redraw(adapter, version)
                own.snapshot(version, adapter.tensors())
                assert (await engine.update(own.describe(version), "drain")).version == version
                await check_answer(engine, live, version)
            async with aclosing(
                engine.generate(ask("long", prompt=PROMPT, max_tokens=LONG, seed=1))
            ) as answer:
                chunks = [await anext(answer)]
                expected_by = {name: each.clone() for name, each in adapter.tensors().items()}
                redraw(adapter, 4)
                own.snapshot(4, adapter.tensors())
                await engine.update(own.describe(4), "drain")
                await check_answer(engine, live, 4)
                chunks += [chunk async for chunk in answer]
            assert set(column(chunks, "versions")) == {3}
            for name, each in adapter.tensors().items():
                each.copy_(expected_by[name])
            expected = forward_logprobs(live, PROMPT, column(chunks, "token_ids"))
            assert column(chunks, "logprobs") == pytest.approx(expected, abs=1e-3)

    play(scene)
