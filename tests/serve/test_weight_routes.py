"""New weights over HTTP: by the calls that vLLM's servers get, and in one call."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from penstock.models.published import published_tensors
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous, make_publisher
from tests.engines.contract import ask, collect
from tests.serve.live_server import serving
from tests.vllm_live.live import changed, column, forward_logprobs, load, opened, parts_of
from tests.vllm_live.test_live_weights import Trainer

PROMPT = [1, 10, 2, 11]


@pytest.mark.parametrize("transport", ["shared_memory", "filesystem"])
def test_a_trainer_that_joins_updates_the_server(tiny_model: Path, tmp_path: Path, transport: str) -> None:
    async def scene() -> None:
        async with (
            serving(tiny_model, updates=True) as live,
            opened(parts_of(str(tiny_model), urls=(live.address,))) as engine,
        ):
            model = changed(load(str(tiny_model)), seed=1)
            trainer = Trainer(model, transport, tmp_path)
            try:
                receipt = await trainer.bring(engine, 7)
            finally:
                trainer.close()
            assert receipt.version == 7
            chunks = await collect(engine.generate(ask("r", prompt=PROMPT, max_tokens=20, seed=3)))
            tokens = column(chunks, "token_ids")
            assert set(column(chunks, "versions")) == {7}
            assert column(chunks, "logprobs") == pytest.approx(
                forward_logprobs(model, PROMPT, tokens), abs=1e-4
            )

    asyncio.run(scene())


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    async with session.post(url, json=body) as response:
        return response.status, await response.json()


def test_one_call_takes_a_whole_update_and_a_damaged_one_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        model = changed(load(str(tiny_model)), seed=1)
        publisher: Any = make_publisher(
            "filesystem", published_tensors(model), Publishing(), Rendezvous(folder=tmp_path)
        )
        async with serving(tiny_model, updates=True) as live, aiohttp.ClientSession() as session:
            publisher.snapshot(3, published_tensors(model))
            update = msgspec.to_builtins(publisher.describe(3, full=True))
            url = f"{live.address}/update_weights"
            broken = update | {"buckets": ["/nowhere"] * len(update["buckets"])}
            status, found = await post(session, url, {"update": broken})
            assert status == 500
            assert "/nowhere" in found["error"]["message"]
            assert live.opened.engine.versions == {"policy": 0}
            status, found = await post(session, url, {"update": update, "interrupt": "inflight"})
            assert (status, found["version"]) == (200, 3)
            assert live.opened.engine.versions == {"policy": 3}
        publisher.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/update_weights", {"update": {"version": 1}}, "update is not a penstock update"),
        ("/update_weights", {"update_info": {"version": 5}}, "no such update is staged"),
        ("/collective_rpc", {"method": "os_system", "args": ["ls"]}, "is not known here"),
        ("/collective_rpc", {"method": "penstock_stage", "args": ["{}"]}, "needs an update"),
        ("/update_weight_version", {"new_version": "latest"}, "must be a number"),
    ],
)
def test_another_call_is_a_sentence(tiny_model: Path, path: str, body: Any, said: str) -> None:
    async def scene() -> None:
        async with serving(tiny_model, updates=True) as live, aiohttp.ClientSession() as session:
            status, found = await post(session, live.address + path, body)
            assert status in (400, 409)
            assert said in found["error"]["message"]

    asyncio.run(scene())


def test_without_updates_there_are_no_such_routes(tiny_model: Path) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as live, aiohttp.ClientSession() as session:
            status, _ = await post(session, f"{live.address}/update_weights", {})
            assert status == 404

    asyncio.run(scene())
