"""Weights from a publisher into a real server: what it samples afterwards is what a plain forward pass gives."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import nn

from penstock.engines.kinds import ServedEngine
from penstock.engines.vllm.server_client import ServerClient
from penstock.errors import FingerprintMismatch, PenstockError
from penstock.models.published import published_tensors
from penstock.records import Interrupt, since_restart
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous, make_publisher
from tests.engines.contract import ask, collect
from tests.vllm_live.live import (
    CONTEXT,
    LONG,
    changed,
    column,
    forward_logprobs,
    load,
    parts_of,
    play,
    running,
)

PROMPT = [1, 10, 2, 11]
CLOSE = 1e-3


class Trainer:
    """Publishes the weights of a model over one transport."""

    def __init__(self, model: nn.Module, transport: str, folder: Path) -> None:
        self._model = model
        self._publisher: Any = make_publisher(
            transport, published_tensors(model), Publishing(), Rendezvous(folder=folder)
        )

    async def bring(
        self, engine: ServedEngine, version: int, interrupt: Interrupt = "inflight", **fields: Any
    ) -> Any:
        self._publisher.snapshot(version, published_tensors(self._model))
        update = msgspec.structs.replace(self._publisher.describe(version, full=True), **fields)
        try:
            if not update.sends:
                return await engine.update(update, interrupt)
            sending = asyncio.ensure_future(asyncio.to_thread(self._publisher.send, version))
            await engine.stage(update)
            await sending
            return await engine.update(update, interrupt)
        finally:
            self._publisher.release(version)

    def close(self) -> None:
        self._publisher.close()


@asynccontextmanager
async def training(
    server: str, model: str, folder: Path, transport: str = "shared_memory"
) -> AsyncIterator[tuple[ServedEngine, nn.Module, Trainer]]:
    """An engine, the model whose weights it gets, and who sends them. In the end it has its first weights again."""
    async with running(parts_of(model, urls=(server,), context=CONTEXT)) as engine:
        first = load(model)
        live = load(model)
        trainer = Trainer(live, transport, folder)
        try:
            yield engine, live, trainer
        finally:
            live.load_state_dict(first.state_dict())
            await trainer.bring(engine, 1000, "abort_retry")
            trainer.close()


async def outcome(server: str) -> dict[str, Any]:
    """What the worker says of its last update."""
    async with ServerClient("asking", server) as client:
        (answer,) = await client.ask_workers("penstock_outcome")
        return answer


async def check_answer(engine: ServedEngine, model: nn.Module, version: int) -> None:
    chunks = await collect(engine.generate(ask(f"v{version}", prompt=PROMPT, max_tokens=30, seed=version)))
    tokens = column(chunks, "token_ids")
    assert set(column(chunks, "versions")) == {version}
    expected = forward_logprobs(model, PROMPT, tokens)
    assert column(chunks, "logprobs") == pytest.approx(expected, abs=CLOSE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["shared_memory", "collective", "filesystem"])
def test_updates_reach_the_sampler(server: str, model: str, tmp_path: Path, transport: str) -> None:
    async def scene() -> None:
        async with training(server, model, tmp_path, transport) as (engine, live, trainer):
            await check_answer(engine, live, 0)
            for version in (1, 2):
                changed(live, version)
                receipt = await trainer.bring(engine, version)
                assert receipt.version == version
                assert (await outcome(server))["unverified"] == []
                await check_answer(engine, live, version)

    play(scene)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("interrupt", ["inflight_recompute", "drain", "abort_resume", "abort_retry"])
def test_every_token_is_of_the_weights_that_its_version_names(
    server: str, model: str, tmp_path: Path, interrupt: Interrupt
) -> None:
    async def scene() -> None:
        async with training(server, model, tmp_path) as (engine, live, trainer):
            before = load(model)
            async with aclosing(engine.generate(ask("a", prompt=PROMPT, max_tokens=LONG, seed=5))) as answer:
                chunks = [await anext(answer)]
                changed(live, 3, scale=0.3)
                updating = asyncio.create_task(trainer.bring(engine, 1, interrupt))
                chunks += [chunk async for chunk in answer]
                await updating
            chunks = list(since_restart(chunks))
            tokens, versions = column(chunks, "token_ids"), column(chunks, "versions")
            assert len(tokens) == LONG
            expected = {"drain": {0}, "abort_retry": {1}}.get(interrupt, {0, 1})
            assert set(versions) == expected
            by_version = [forward_logprobs(each, PROMPT, tokens) for each in (before, live)]
            exact = [by_version[version][place] for place, version in enumerate(versions)]
            assert column(chunks, "logprobs") == pytest.approx(exact, abs=CLOSE)

    play(scene)


@pytest.mark.smoke
@pytest.mark.timeout(300)
def test_inflight_goes_on_within_one_answer(server: str, model: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with training(server, model, tmp_path) as (engine, live, trainer):
            async with aclosing(engine.generate(ask("a", prompt=PROMPT, max_tokens=LONG, seed=5))) as answer:
                chunks = [await anext(answer)]
                changed(live, 3)
                receipt = await trainer.bring(engine, 1)
                chunks += [chunk async for chunk in answer]
            versions = column(chunks, "versions")
            assert versions == sorted(versions)
            assert set(versions) == {0, 1}
            assert receipt.stall_s < 5
            await check_answer(engine, live, 1)  # nothing that older weights computed is read

    play(scene)


@pytest.mark.timeout(300)
def test_what_is_not_the_trainers_is_refused_and_the_server_goes_on(
    server: str, model: str, tmp_path: Path
) -> None:
    async def scene() -> None:
        async with training(server, model, tmp_path) as (engine, live, trainer):
            await check_answer(engine, live, 0)
            wrong = dict.fromkeys(published_tensors(live), 1)
            with pytest.raises(FingerprintMismatch, match="version 1"):
                await trainer.bring(engine, 1, fingerprint=wrong)
            with pytest.raises(PenstockError, match="is gone"):
                await trainer.bring(engine, 2, buckets=("64:/nowhere",))
            assert (await engine.report()).versions == {"policy": 0}
            await check_answer(engine, live, 0)

    play(scene)
