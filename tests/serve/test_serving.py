"""A real server: clients that come, leave and misbehave, and engines that join it."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch

from penstock.bench.shapes import SHAPES, save_shape
from penstock.channel.address import is_loopback
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.opening import without_auto
from penstock.engines.kinds import EngineParts
from penstock.errors import UserError
from penstock.http_server.web_server import HttpServer
from penstock.records.interfaces import Engine
from penstock.serve.serving import ServeSettings, open_engine, served
from tests.engines.contract import EngineContract
from tests.serve.live_server import Live, serving
from tests.vllm_live.live import parts_of, running

LONG = {"token_ids": [1, 2, 3], "stream": True, "sampling_params": {"max_tokens": 400, "ignore_eos": True}}


@pytest.fixture
def long_model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with room for answers that take a while."""
    folder = shutil.copytree(tiny_model, tmp_path / "long_model")
    settings = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


class TestJoined(EngineContract):
    """The engine that speaks to vLLM's servers speaks to ours."""

    @pytest.fixture(autouse=True)
    def _model(self, tiny_model: Path) -> None:
        self.model = tiny_model

    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        async with (
            serving(self.model, updates=True) as live,
            running(parts_of(str(self.model), urls=(live.address,))) as engine,
        ):
            yield engine


async def until_idle(live: Live) -> None:
    while (await live.opened.engine.report()).num_running:  # noqa: ASYNC110  (nothing tells that a socket was closed)
        await asyncio.sleep(0)


async def short_answer(session: aiohttp.ClientSession, live: Live) -> list[int]:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "ignore_eos": True, "seed": 1}}
    async with session.post(f"{live.address}/inference/v1/generate", json=body) as response:
        found: list[int] = (await response.json())["choices"][0]["token_ids"]
        return found


async def begin(
    live: Live, body: bytes, *, length: int | None = None, path: str = "/inference/v1/generate"
) -> asyncio.StreamWriter:
    """A request by hand, whose answer nobody reads."""
    host, port = live.address.removeprefix("http://").split(":")
    one = socket.socket()
    one.setblocking(False)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    await asyncio.get_running_loop().sock_connect(one, (host, int(port)))
    _, writer = await asyncio.open_connection(sock=one)
    writer.transport.pause_reading()  # type: ignore[attr-defined]  (it is of a socket)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


def test_clients_that_vanish_free_their_places(long_model: Path) -> None:
    async def scene() -> None:
        async with serving(long_model, max_context=512) as live, aiohttp.ClientSession() as session:
            alone = await short_answer(session, live)
            writers = [await begin(live, json.dumps(LONG).encode()) for _ in range(40)]
            while (await live.opened.engine.report()).num_running < 40:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for writer in writers:
                writer.transport.abort()
            async with asyncio.timeout(10):
                await until_idle(live)
            assert (await live.opened.engine.report()).counters["tokens"] < 40 * 400
            assert await short_answer(session, live) == alone

    asyncio.run(scene())


def test_clients_that_never_read_and_requests_that_never_end_hold_nobody_up(long_model: Path) -> None:
    async def scene() -> None:
        async with serving(long_model, max_context=512) as live, aiohttp.ClientSession() as session:
            alone = await short_answer(session, live)
            writers = [await begin(live, json.dumps(LONG).encode()) for _ in range(30)]
            writers += [await begin(live, b'{"token_ids": [', length=1 << 30) for _ in range(30)]
            async with asyncio.timeout(20):
                assert await short_answer(session, live) == alone
            for writer in writers:
                writer.transport.abort()

    asyncio.run(scene())


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes little of what a client does not read, on both sides: so the server feels it."""
    start = HttpServer.open

    async def open_small(server: HttpServer, place: tuple[str, int] | socket.socket) -> None:
        await start(server, place)
        for listening in server.sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those it accepts inherit it

    monkeypatch.setattr(HttpServer, "open", open_small)


SILENT, LEAVING, UNFINISHED = 100, 400, 500
BODY = 256 * 1024
ALL_BODIES = 16 * 2**20


@pytest.mark.usefixtures("small_buffers")
def test_a_thousand_slow_or_vanishing_clients_leave_it_serving_and_memory_bounded(long_model: Path) -> None:
    """Half of them never finish their request, which is large; a third leaves at once; the others never read their
    long answers. An event of these has the prompt in it, so that an answer is larger than all buffers."""
    long = {
        "prompt": [11] * 400,
        "max_tokens": 110,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    brief = LONG | {"sampling_params": {"max_tokens": 30, "ignore_eos": True}}

    async def scene() -> None:
        async with (
            serving(long_model, max_context=512, all_bodies_bytes=ALL_BODIES) as live,
            aiohttp.ClientSession() as session,
        ):
            alone = await short_answer(session, live)
            before = psutil.Process().memory_info().rss
            unfinished = [await begin(live, b" " * BODY, length=1 << 20) for _ in range(UNFINISHED)]
            leaving = [await begin(live, json.dumps(brief).encode()) for _ in range(LEAVING)]
            text = json.dumps(long).encode()
            silent = [await begin(live, text, path="/v1/completions") for _ in range(SILENT)]
            for writer in leaving:
                writer.transport.abort()
            async with asyncio.timeout(60):
                # The engine is done, and every silent client still has something to read.
                while not await are_unread(session, live, SILENT):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert await short_answer(session, live) == alone
            grown = psutil.Process().memory_info().rss - before
            assert grown < ALL_BODIES + (SILENT + LEAVING + UNFINISHED) * 100 * 1024
            for writer in (*unfinished, *silent):
                writer.transport.abort()

    asyncio.run(scene())


async def are_unread(session: aiohttp.ClientSession, live: Live, count: int) -> bool:
    """Whether the engine is done, and the server has so many generations that it can't send whole."""
    report = await live.opened.engine.report()
    async with session.get(f"{live.address}/metrics") as response:
        found = re.search(r"^penstock_http_generations\{.*\} (\d+)$", await response.text(), re.MULTILINE)
    assert found is not None
    return report.num_running + report.num_waiting == 0 and int(found[1]) == count


def test_a_stream_that_fails_says_so_and_ends(long_model: Path) -> None:
    async def scene() -> None:
        async with serving(long_model, max_context=512) as live, aiohttp.ClientSession() as session:
            async with session.post(f"{live.address}/inference/v1/generate", json=LONG) as response:
                await response.content.readline()
                live.opened.engine._updates.fail(RuntimeError("the device is gone"))
                rest = (await response.content.read()).decode()
            assert '"error"' in rest
            assert rest.endswith("data: [DONE]\n\n")
            async with session.get(f"{live.address}/health") as response:
                assert response.status == 503

    asyncio.run(scene())


def test_the_openai_client_works_unchanged(tiny_model: Path) -> None:
    import openai

    def talk(address: str) -> None:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        (model,) = client.models.list().data
        assert (model.id, model.max_model_len) == ("tiny", 64)  # type: ignore[attr-defined]
        whole = client.completions.create(model="tiny", prompt="12+3=", max_tokens=8, seed=4, logprobs=1)
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 5
        pieces = client.completions.create(model="tiny", prompt="12+3=", max_tokens=8, seed=4, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
        with pytest.raises(openai.NotFoundError, match="POST /v1/responses is not served here"):
            client.responses.create(model="tiny", input="hi")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens"):
            client.completions.create(model="tiny", prompt="1" * 100)

    async def scene() -> None:
        async with serving(tiny_model) as live:
            await asyncio.to_thread(talk, live.address)

    asyncio.run(scene())


@pytest.fixture
def chat_model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with a template that shows tools, in the tokens that it has."""
    folder = shutil.copytree(tiny_model, tmp_path / "chat_model")
    template = "{% if tools %}{{ tools | length }}{# <tool_call> #}+{% endif %}{% for m in messages %}{{ m.content }}="
    (folder / "chat_template.jinja").write_text(template + "{% endfor %}")
    return folder


def test_the_openai_client_chats_unchanged(chat_model: Path) -> None:
    import openai

    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "12+3"}],
        "max_tokens": 8,
        "seed": 4,
    }

    def talk(address: str) -> None:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        whole = client.chat.completions.create(**asked, n=2, tools=[tool], logprobs=True)
        assert [choice.index for choice in whole.choices] == [0, 1]
        assert all(choice.message.role == "assistant" for choice in whole.choices)
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.choices[0].message.tool_calls) == (7, None)  # "1+12+3="
        texts, usages = ["", ""], []
        for event in client.chat.completions.create(
            **asked, n=2, tools=[tool], stream=True, stream_options={"include_usage": True}
        ):
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
            usages.append(event.usage)
        assert texts == [choice.message.content for choice in whole.choices]
        assert usages[-1] == whole.usage
        assert set(usages[:-1]) == {None}
        plain = client.chat.completions.create(**asked)
        assert plain.usage is not None
        assert plain.usage.prompt_tokens == 5
        with pytest.raises(openai.BadRequestError, match="top_logprobs is not supported"):
            client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)

    async def scene() -> None:
        async with serving(chat_model) as live:
            await asyncio.to_thread(talk, live.address)

    asyncio.run(scene())


def test_an_address_that_others_reach_needs_a_token() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(UserError, match="needs a token: give --token-file"):
        ServeSettings(model="m", host="0.0.0.0").check()
    ServeSettings(model="m", host="0.0.0.0", token="x" * 16).check()


@pytest.mark.parametrize(("shape", "chosen"), [("tiny", "off"), ("135m", "on")])
def test_auto_is_resolved_as_in_a_run(shape: str, chosen: str, tmp_path: Path) -> None:
    from transformers import Qwen2Config

    Qwen2Config(**SHAPES[shape]).save_pretrained(tmp_path)

    def resolved(device: str, compiling: str) -> tuple[str, str]:
        config = EngineConfig(device=device, embedded={"compile": compiling})
        found = without_auto(str(tmp_path), config)
        return found.embedded.compile, found.record_routing

    assert resolved("cuda", "auto") == (chosen, "off")
    assert resolved("cpu", "auto") == ("off", "off")
    assert [resolved("cuda", given)[0] for given in ("on", "off")] == ["on", "off"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_large_model_is_compiled_on_a_gpu(tmp_path: Path) -> None:
    save_shape("135m", tmp_path, "cuda", "")

    async def scene() -> str:
        opened = await open_engine(
            ServeSettings(model=str(tmp_path)), EngineConfig(device="cuda", max_context=256)
        )
        await opened.engine.close()
        return opened.engine.config.compile

    assert asyncio.run(scene()) == "on"


def test_a_taken_port_is_a_sentence(tiny_model: Path) -> None:
    async def scene() -> None:
        async with serving(tiny_model) as live:
            port = int(live.address.rpartition(":")[2])
            with pytest.raises(UserError, match=r"can't listen on 127\.0\.0\.1:\d+: .*choose another --port"):
                async with serving_at(tiny_model, port):
                    pass

    asyncio.run(scene())


@asynccontextmanager
async def serving_at(model: Path, port: int) -> AsyncIterator[None]:
    settings = ServeSettings(model=str(model), port=port)
    opened = await open_engine(settings, EngineConfig(device="cpu", dtype="float32", max_context=64))
    async with served(settings, opened):
        yield


@pytest.mark.processes
def test_an_adapter_goes_into_the_model_that_is_served(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[EngineParts] = []

    async def open_embedded(parts: EngineParts) -> None:
        opened.append(parts)
        raise UserError("that will do")

    monkeypatch.setattr("penstock.serve.serving.open_embedded", open_embedded)
    settings = ServeSettings(model="demo").of_folder(str(tiny_model), str(tmp_path))
    with pytest.raises(UserError, match="that will do"):
        asyncio.run(open_engine(settings, EngineConfig(device="cpu", dtype="float32")))
    assert (opened[0].model, opened[0].adapter) == (str(tiny_model), str(tmp_path))


def test_the_command_serves_until_a_signal(tiny_model: Path, tmp_path: Path) -> None:
    """`builtin`, whose model is a tiny one here, for who has the token."""
    stand_in = f"import penstock.cli.serve as serve; serve.open_builtin = lambda name, cache, log: {{'builtin': {str(tiny_model)!r}}}[name]; "
    command = [sys.executable, "-c", f"{stand_in}from penstock.cli import main; main()"]
    (tmp_path / "token").write_text("a-token-of-some-length\n")
    (tmp_path / "token").chmod(0o600)
    process = subprocess.Popen(
        [
            *(*command, "serve", "builtin", "--port", "0", "--token-file", str(tmp_path / "token")),
            *("engine.max_context=64", "engine.threads=1"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        try:
            line = process.stdout.readline()
            address = re.search(r"http://\S+", line)
            assert address is not None, line
            refused = asyncio.run(fetch(f"{address[0]}/models", "wrong"))
            assert refused["error"]["code"] == "invalid_api_key"
            found = asyncio.run(fetch(f"{address[0]}/models", "a-token-of-some-length"))
            assert found["data"][0]["id"] == "builtin"
        finally:
            process.terminate()
        assert process.stdout.readline() == "ending: running answers are cut off\n"
    assert process.returncode == 0


async def fetch(url: str, token: str) -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return await response.json()
