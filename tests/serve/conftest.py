"""A tokenizer for any text, one token a byte, and an engine that says what a test wants."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from penstock.engines.scripted import ScriptedEngine
from penstock.http_server.guard import guard_for
from penstock.models.tokenizer import ChatTokenizer
from penstock.serve.bodies import BodyBudget
from penstock.serve.served_model import ServedModel
from penstock.serve.server_app import make_app

END = 256
TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call>{{ '\\n' }}{% endif %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}!{{ call.function.name }}({{ call.function.arguments.x }}){% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("byte_tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)} | {"<end>": END}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return ChatTokenizer(str(folder))


Saying = Callable[..., ServedModel]


@pytest.fixture
def saying(byte_tokenizer: ChatTokenizer) -> Saying:
    """A model that answers everything with one text, and ends there."""

    def make(text: str, **settings: int) -> ServedModel:
        token_ids = [*byte_tokenizer.encode(text), END]
        engine = ScriptedEngine(lambda request: token_ids)
        return ServedModel(name="echo", engine=engine, tokenizer=byte_tokenizer, max_context=4096, **settings)

    return make


@asynccontextmanager
async def client_of(
    routes: list[web.RouteDef], token: str = "", bodies: BodyBudget | None = None
) -> "AsyncIterator[TestClient[web.Request, web.Application]]":
    app = make_app(
        routes, guard=guard_for("127.0.0.1", advice="ask by its address"), token=token, bodies=bodies
    )
    async with TestClient(TestServer(app), headers={"Content-Type": "application/json"}) as client:
        yield client


async def events_of(response: object) -> list[dict]:  # type: ignore[type-arg]
    """What a stream of server-sent events holds; it must end as one."""
    import json

    lines = (await response.text()).split("\n\n")  # type: ignore[attr-defined]
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
