"""Answers that are sent while they are made: what clients see when, and that the record is the same."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import BadRequestError

from penstock.models.tokenizer import ChatTokenizer
from penstock.serve.server_events import SentEvents
from penstock.types import Chunk, GenerateRequest, Turn
from tests.serve.agents.doors import END, Visit, a_spec, opened, saying

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASKED: list[Any] = [{"role": "user", "content": "a"}]
BODY = {"model": "echo", "messages": ASKED, "stream": True}


class Permits:
    """The engine's `sleep`: as many tokens come as were allowed."""

    def __init__(self) -> None:
        self._left = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        await self._left.acquire()

    def allow(self, count: int) -> None:
        for _ in range(count):
            self._left.release()


async def next_event(response: aiohttp.ClientResponse) -> dict[str, Any] | None:
    """None at the end of the stream."""
    async with asyncio.timeout(20):
        line = await response.content.readline()
        assert await response.content.readline() == b"\n"
    return None if line == b"data: [DONE]\n" else json.loads(line.removeprefix(b"data: "))


async def all_events(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    events = []
    while (event := await next_event(response)) is not None:
        events.append(event)
    return events


def said(events: Sequence[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])


def chat(one: Visit, **fields: Any) -> Any:
    return one.http.post(one.endpoint.base_url + "/chat/completions", json=BODY | fields)


def recorded(turn: Turn) -> tuple[list[float], ...]:
    return tuple(array.tolist() for array in (turn.output_ids, turn.logprobs, turn.prompt_ids))


async def until_noticed(one: Visit) -> None:
    """That a client has left."""
    calls = one.door.keys.session(one.endpoint.api_key)._every
    async with asyncio.timeout(20):
        while calls[-1].num_listeners:  # noqa: ASYNC110  (nothing tells that a socket was closed)
            await asyncio.sleep(0)


def test_pieces_come_as_the_engine_makes_them_and_the_record_is_that_of_a_whole_answer(
    byte_tokenizer: ChatTokenizer,
) -> None:
    async def main() -> None:
        permits = Permits()
        engine = saying(byte_tokenizer, "hello you", sleep=permits)
        async with opened(engine, byte_tokenizer) as visit:
            one, other = visit(a_spec(chunk_tokens=2)), visit(a_spec(1))
            permits.allow(4)
            async with chat(one, stream_options={"include_usage": True}) as response:
                first = [await next_event(response) for _ in range(3)]
                assert said(first) == "hell"
                assert first[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
                engine.version = 7  # new weights in the middle of the answer
                assert one.rollout.turns == ()
                permits.allow(6)
                rest = await all_events(response)
            assert said(rest) == "o you"
            reasons = [event["choices"][0]["finish_reason"] for event in rest if event["choices"]]
            assert reasons == [None, None, "stop"]
            assert rest[-1]["usage"]["completion_tokens"] == 10
            engine.version = 0
            permits.allow(10)
            async with chat(other, stream=False) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == "hello you"
            (streamed,), (whole,) = one.rollout.turns, other.rollout.turns
            assert recorded(streamed) == recorded(whole)
            assert (streamed.versions.tolist(), whole.versions.tolist()) == ([0] * 4 + [7] * 6, [0] * 10)
            assert (one.door.dismiss(one.endpoint), one.door.dismiss(other.endpoint)) == (0, 0)

    asyncio.run(main())


def test_a_call_of_a_tool_is_held_back_until_it_is_whole_and_goes_on_as_one_sample(
    byte_tokenizer: ChatTokenizer,
) -> None:
    """The OpenAI client as it is, which puts streamed calls together itself."""
    call = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'

    async def main() -> None:
        async with opened(saying(byte_tokenizer, "well " + call, "done"), byte_tokenizer) as visit:
            one = visit(a_spec(chunk_tokens=3))
            client = one.openai()
            async with client.chat.completions.stream(model="echo", messages=ASKED, tools=[ADD]) as stream:
                texts = [event.delta async for event in stream if event.type == "content.delta"]
                made = (await stream.get_final_completion()).choices[0]
            assert "".join(texts).strip() == "well"
            assert len(texts) > 1
            assert made.finish_reason == "tool_calls"
            assert [tool.function.name for tool in made.message.tool_calls or []] == ["add"]
            answer = {
                "role": "assistant",
                "content": made.message.content,
                "tool_calls": [t.model_dump() for t in made.message.tool_calls or []],
            }
            result = {"role": "tool", "tool_call_id": "1", "content": "2"}
            asked = [*ASKED, answer, result]
            again = await client.chat.completions.create(model="echo", messages=asked, tools=[ADD])
            assert again.choices[0].message.content == "done"
            await client.close()
            assert [turn.parent for turn in one.rollout.turns] == [None, "g12.0.0"]
            assert one.rollout.rewrites == {}

    asyncio.run(main())


def test_a_client_that_vanishes_is_counted_and_who_asks_again_gets_the_same_turn(
    byte_tokenizer: ChatTokenizer,
) -> None:
    async def main() -> None:
        permits = Permits()
        engine = saying(byte_tokenizer, "1234", "5678", "9", sleep=permits)
        async with opened(engine, byte_tokenizer) as visit:
            one, other = visit(a_spec(chunk_tokens=1)), visit(a_spec(1, chunk_tokens=1))

            async def leave(**fields: Any) -> None:
                async with chat(one, **fields) as response:
                    events = [await next_event(response) for _ in range(3)]
                    assert len(said(events)) == 2
                    response.close()
                await until_noticed(one)

            permits.allow(2)
            await leave()
            again = asyncio.create_task(one.http.post(one.endpoint.base_url + "/chat/completions", json=BODY))
            permits.allow(3)
            async with await again as response:
                assert said(await all_events(response)) == "1234"
            assert [turn.text for turn in one.rollout.turns] == ["1234"]
            permits.allow(2)
            await leave(user="another call")
            permits.allow(3)  # it is made to its end, and nobody has asked again
            while (await engine.report()).num_running:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert [turn.text for turn in one.rollout.turns] == ["1234"]
            permits.allow(2)
            async with chat(other) as response:
                assert said(await all_events(response)) == "9"
            assert (one.door.dismiss(one.endpoint), one.door.dismiss(other.endpoint)) == (1, 0)
            assert len(engine.requests) == 3

    asyncio.run(main())


@pytest.mark.parametrize("path", ["completions", "generate"])
def test_text_and_token_ids_stream_too(byte_tokenizer: ChatTokenizer, path: str) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "hi there"), byte_tokenizer) as visit:
            one = visit(a_spec(chunk_tokens=3))
            body: dict[str, Any] = {"stream": True, "prompt": "b", "return_token_ids": True}
            url = one.endpoint.base_url + "/completions"
            if path == "generate":
                body, url = {"stream": True, "token_ids": [98]}, one.root + "/inference/v1/generate"
            async with one.http.post(url, json=body) as response:
                choices = [event["choices"][0] for event in await all_events(response)]
            assert [len(choice["token_ids"]) for choice in choices] == [3, 3, 3]
            assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
            (turn,) = one.rollout.turns
            assert [token for choice in choices for token in choice["token_ids"]] == turn.output_ids.tolist()
            if path == "generate":
                assert choices[-1]["weight_versions"] == [{"version": "0", "start": 0, "end": 9}]
                assert [len(choice["logprobs"]["content"]) for choice in choices] == [3, 3, 3]
            else:
                assert "".join(choice["text"] for choice in choices) == "hi there"
                assert choices[-1]["prompt_token_ids"] == turn.prompt_ids.tolist()

    asyncio.run(main())


def test_several_choices_are_told_apart(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "aaaa", "bb"), byte_tokenizer) as visit:
            one = visit(a_spec(chunk_tokens=1))
            async with chat(one, n=2) as response:
                events = await all_events(response)
            texts = [said([e for e in events if e["choices"][0]["index"] == number]) for number in range(2)]
            assert sorted(texts) == ["aaaa", "bb"]
            assert [turn.text for turn in one.rollout.turns] == texts

    asyncio.run(main())


def test_what_is_refused_is_an_ordinary_error(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer, max_context=40) as visit:
            one = visit()
            client = one.openai(max_retries=0)
            long: list[Any] = [{"role": "user", "content": "x" * 100}]
            with pytest.raises(BadRequestError, match="maximum context length is 40 tokens"):
                await client.chat.completions.create(model="echo", messages=long, stream=True)
            await client.close()
            assert one.door.dismiss(one.endpoint) == 0

    asyncio.run(main())


class BeginsAgain:
    """`TokenSource` that says "ab", and then begins again with another text."""

    def __init__(self, tokenizer: ChatTokenizer, again: str) -> None:
        self._texts = (tokenizer.encode("ab"), tokenizer.encode(again), [END])

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        for number, ids in enumerate(self._texts):
            yield Chunk(
                token_ids=np.array(ids, dtype=np.int32),
                logprobs=np.zeros(len(ids), dtype=np.float32),
                versions=np.full(len(ids), number, dtype=np.int32),
                restarts=number == 1,
                finish_reason="stop" if number == 2 else None,
            )
            await asyncio.sleep(0)


def test_an_answer_that_begins_again_with_what_was_sent_goes_on(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        async with opened(BeginsAgain(byte_tokenizer, "abc"), byte_tokenizer) as visit:
            one = visit()
            async with chat(one) as response:
                assert said(await all_events(response)) == "abc"
            assert [turn.text for turn in one.rollout.turns] == ["abc"]

    asyncio.run(main())


def test_one_that_begins_otherwise_fails_and_comes_whole_to_who_asks_again(
    byte_tokenizer: ChatTokenizer,
) -> None:
    async def main() -> None:
        async with opened(BeginsAgain(byte_tokenizer, "xyz"), byte_tokenizer) as visit:
            one = visit()
            async with chat(one) as response:
                *events, error = await all_events(response)
            assert said(events) == "ab"
            assert "began again" in error["error"]["message"]
            assert one.rollout.turns == ()
            async with chat(one) as response:
                assert said(await all_events(response)) == "xyz"
            assert [turn.text for turn in one.rollout.turns] == ["xyz"]

    asyncio.run(main())


def test_where_answers_may_begin_again_they_are_sent_whole(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        async with opened(BeginsAgain(byte_tokenizer, "xyz"), byte_tokenizer, streams=False) as visit:
            one = visit()
            async with chat(one) as response:
                events = await all_events(response)
            assert [event["choices"][0]["delta"].get("content") for event in events] == ["", "xyz"]

    asyncio.run(main())


def test_a_turn_is_the_episodes_before_its_last_event_leaves(
    byte_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent may end as soon as it has it, and its episode with it."""
    num_turns: list[int] = []
    send = SentEvents.send

    async def main() -> None:
        async with opened(saying(byte_tokenizer, "1234"), byte_tokenizer) as visit:
            one = visit(a_spec(chunk_tokens=2))

            async def noting(stream: SentEvents, event: dict[str, Any]) -> None:
                num_turns.append(len(one.rollout.turns))
                await send(stream, event)

            monkeypatch.setattr(SentEvents, "send", noting)
            async with chat(one) as response:
                assert said(await all_events(response)) == "1234"

    asyncio.run(main())
    assert num_turns == [0, 0, 0, 1]
