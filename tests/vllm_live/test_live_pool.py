"""Servers of our own, and pools: one that is killed comes back, and kinds of engines work together."""

import asyncio
import contextlib
import copy
import os
import signal
from contextlib import aclosing
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.engines.engine_pool import EnginePool
from penstock.engines.kinds import ServedEngine, open_engine
from penstock.engines.vllm.vllm_engine import VllmEngine
from penstock.engines.vllm.weight_calls import HalfLoaded
from penstock.errors import EngineLost, PenstockError, UserError
from penstock.models.published import published_tensors
from penstock.records import Chunk, GenerateRequest
from penstock.sync.shared_memory import SharedMemoryPublisher
from tests.engines.contract import ask, collect, joined, play
from tests.vllm_live.live import (
    CONTEXT,
    LONG,
    changed,
    column,
    forward_logprobs,
    load,
    opened,
    parts_of,
    reset_weights,
)

PROMPT, OTHER = [1, 10, 2, 11], [3, 10, 4, 11]
URGENCY = (("late", 7), ("urgent", 1), ("soon", 4))


@pytest.mark.timeout(300)
def test_embedded_and_vllm_engines_agree_and_share_a_pool(server: str, model: str, tmp_path: Path) -> None:
    async def scene() -> None:
        live = changed(load(model), 7)
        publisher = SharedMemoryPublisher(published_tensors(live), folder=tmp_path)
        async with (
            opened(parts_of(model, urls=(server,))) as one,
            opened(parts_of(model, kind="embedded")) as two,
        ):
            pool = EnginePool({"vllm0": one, "embedded0": two})
            publisher.snapshot(1, published_tensors(live))
            assert (await pool.update(publisher.describe(1))).version == 1
            asked = [[number % 12, 10, number % 7, 11] for number in range(16)]
            answers = await asyncio.gather(
                *(
                    collect(pool.generate(ask(f"r{number}", prompt=prompt, max_tokens=24, seed=number)))
                    for number, prompt in enumerate(asked)
                )
            )
            counts = [(await each.report()).counters["requests"] for each in (one, two)]
            assert sum(counts) == 16
            assert min(counts) >= 6
            for prompt, chunks in zip(asked, answers, strict=True):
                expected = forward_logprobs(live, prompt, column(chunks, "token_ids"))
                assert column(chunks, "logprobs") == pytest.approx(expected, abs=1e-3)
            live.load_state_dict(load(model).state_dict())
            publisher.snapshot(2, published_tensors(live))
            await one.update(publisher.describe(2))

    play(scene)


async def answer(pool: EnginePool, prompt: list[int], begun: asyncio.Event) -> list[Chunk]:
    """To one long request; tells when its first tokens have come."""
    chunks = []
    async for chunk in pool.generate(ask("long", prompt=prompt, max_tokens=LONG, seed=3)):
        begun.set()
        chunks.append(chunk)
    return chunks


async def begin_in_order(engine: VllmEngine, waiting: list[GenerateRequest]) -> list[str]:
    """Ids of `waiting`, as they begin. All of them come while another request has the server's one place."""
    begun: list[str] = []

    async def watch(request: GenerateRequest) -> None:
        async for _ in engine.generate(request):
            if request.id not in begun:
                begun.append(request.id)

    async with (
        asyncio.TaskGroup() as tasks,
        aclosing(engine.generate(ask("first", max_tokens=LONG))) as first,
    ):
        await anext(first)
        for request in waiting:
            tasks.create_task(watch(request))
        async for _ in first:
            pass
    return begun


def misshapen(model: nn.Module) -> nn.Module:
    """Embeddings of the same shape, and other layers of another one."""
    config = copy.deepcopy(model.config)
    config.intermediate_size *= 2
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.timeout(900)
def test_two_servers_in_a_pool_of_which_one_dies(vllm: str, server: str, model: str, tmp_path: Path) -> None:
    """Two starts of a server: one that is killed, and the one in its place, which is half loaded in the end."""

    async def scene() -> None:
        live = changed(load(model), 8)
        publisher = SharedMemoryPublisher(published_tensors(live), folder=tmp_path)
        own = await open_engine(parts_of(model, command=vllm, context=CONTEXT, max_batch=1, restarts=1))
        assert isinstance(own, VllmEngine)
        watching = asyncio.create_task(own.run())
        try:
            async with opened(parts_of(model, urls=(server,), context=CONTEXT)) as joined_one:
                pool = EnginePool({"joined": joined_one, "own": own})
                publisher.snapshot(1, published_tensors(live))
                assert (await pool.update(publisher.describe(1))).version == 1
                await check_affinity(pool, joined_one, own)
                waiting = [ask(name, max_tokens=4, priority=number) for name, number in URGENCY]
                assert await begin_in_order(own, waiting) == ["urgent", "soon", "late"]
                await check_death(pool, own, live)
                await check_return(pool, own, publisher, live)
                await check_half_loaded(own, live, tmp_path)
            with pytest.raises(UserError, match="has died too often"):
                await watching
        finally:
            await own.close()
            await asyncio.gather(watching, return_exceptions=True)
            await reset_weights(server, model, tmp_path)
        assert own.server_pid is None

    play(scene, 800)


async def check_affinity(pool: EnginePool, one: ServedEngine, two: ServedEngine) -> None:
    """Requests of one prompt go to one server, those of another to the other one."""
    await asyncio.gather(
        *(
            collect(pool.generate(ask(f"{prompt[0]}.{number}", prompt=prompt, max_tokens=4)))
            for number in range(6)
            for prompt in (PROMPT, OTHER)
        )
    )
    assert [(await each.report()).counters["requests"] for each in (one, two)] == [6, 6]


async def check_death(pool: EnginePool, own: VllmEngine, live: nn.Module) -> None:
    """The other server goes on after the tokens that came."""
    begun = asyncio.Event()
    lost: list[str] = []
    pool.on_lost = lambda name, error: lost.append(name)
    answering = asyncio.create_task(answer(pool, OTHER, begun))
    await begun.wait()
    assert (await own.report()).num_running == 1
    assert own.server_pid is not None
    os.kill(own.server_pid, signal.SIGKILL)
    chunks = await answering
    assert lost == ["own"]
    assert len(joined(chunks)) == LONG
    assert set(column(chunks, "versions")) == {1}
    expected = forward_logprobs(live, OTHER, column(chunks, "token_ids"))
    assert column(chunks, "logprobs") == pytest.approx(expected, abs=1e-3)


async def check_return(
    pool: EnginePool, own: VllmEngine, publisher: SharedMemoryPublisher, live: nn.Module
) -> None:
    """A new server in its place serves what the next update brings."""
    publisher.snapshot(2, published_tensors(changed(live, 9)))
    update = publisher.describe(2)
    while (await own.report()).versions != {"policy": 2}:
        with contextlib.suppress(PenstockError):  # it may not have noticed yet, as in a run
            await pool.update(update)
        await asyncio.sleep(0.2)
    chunks = await collect(own.generate(ask("back", prompt=PROMPT, max_tokens=24, seed=1)))
    expected = forward_logprobs(live, PROMPT, column(chunks, "token_ids"))
    assert column(chunks, "logprobs") == pytest.approx(expected, abs=1e-3)


async def check_half_loaded(own: VllmEngine, live: nn.Module, folder: Path) -> None:
    """An update that fails in the middle of a load costs the server, and no answer is sampled from it."""
    wrong = published_tensors(misshapen(live))
    publisher = SharedMemoryPublisher(wrong, folder=folder)
    publisher.snapshot(3, wrong)
    answering = own.generate(ask("cut", prompt=PROMPT, max_tokens=LONG))
    await anext(answering)
    with pytest.raises(HalfLoaded):
        await own.update(publisher.describe(3))
    with pytest.raises(EngineLost):
        await collect(answering)
    with pytest.raises(EngineLost):
        await collect(own.generate(ask("after", prompt=PROMPT)))
    publisher.close()
