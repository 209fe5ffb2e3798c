"""What agents call, through the clients that they call it with."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError

from penstock.engines.scripted import ScriptedEngine
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import Chunk, Episode, GenerateRequest, Turn
from penstock.serve.openai_routes import SentEvents
from tests.records.builders import make_chunk
from tests.serve.agents.doors import END, Visit, a_spec, opened, saying

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"x": %d}}</tool_call>'


def test_a_tool_loop_is_one_sample_with_only_what_was_sampled_in_the_loss(
    byte_tokenizer: ChatTokenizer,
) -> None:
    """Two calls at once in one answer, both answered; the OpenAI client as it is."""

    async def main() -> Episode:
        engine = saying(byte_tokenizer, CALL % 1 + CALL % 2, "three")
        async with opened(engine, byte_tokenizer) as visit:
            one = visit()
            client = one.openai()
            messages: list[Any] = [{"role": "user", "content": "1+2?"}]
            first = await client.chat.completions.create(model="echo", messages=messages, tools=[ADD])
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            calls = message.tool_calls or []
            assert [call.function.arguments for call in calls] == ['{"x": 1}', '{"x": 2}']
            messages.append(message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
            second = await client.chat.completions.create(model="echo", messages=messages, tools=[ADD])
            assert second.choices[0].message.content == "three"
            await client.close()
            assert one.rollout.rewrites == {}
            return Episode(task_id="t", turns=one.rollout.turns)

    episode = asyncio.run(main())
    (sample,) = episode.samples()
    kept = byte_tokenizer.decode(sample.token_ids[sample.loss_mask].tolist())
    assert kept == CALL % 1 + CALL % 2 + "three"
    whole = byte_tokenizer.decode(sample.token_ids.tolist())
    assert whole == (
        "tools:add <tool_call>\nuser:1+2?\nassistant:"
        + CALL % 1
        + CALL % 2
        + "\ntool:ok\ntool:ok\nassistant:three"
    )
    assert [turn.id for turn in episode.turns] == ["g12.0.0", "g12.0.1"]
    assert episode.turns[1].parent == "g12.0.0"
    assert set(sample.versions[sample.loss_mask].tolist()) == {0}
    assert set(sample.logprobs[sample.loss_mask].tolist()) == {-1.0}


def test_a_client_that_rewrites_history_makes_a_second_sample_and_is_counted(
    byte_tokenizer: ChatTokenizer,
) -> None:
    async def main() -> tuple[Episode, dict[str, int]]:
        async with opened(saying(byte_tokenizer, "one", "two"), byte_tokenizer) as visit:
            one, client = (each := visit()), each.openai()
            asked: list[Any] = [{"role": "user", "content": "hello"}]
            await client.chat.completions.create(model="echo", messages=asked)
            asked += [{"role": "assistant", "content": "another"}, {"role": "user", "content": "more"}]
            await client.chat.completions.create(model="echo", messages=asked)
            await client.close()
            return Episode(task_id="t", turns=one.rollout.turns), one.rollout.rewrites

    episode, rewrites = asyncio.run(main())
    assert rewrites == {"client": 1}
    first, second = episode.samples()
    assert [byte_tokenizer.decode(s.token_ids[s.loss_mask].tolist()) for s in (first, second)] == [
        "one",
        "two",
    ]


def test_streams_completions_and_token_ids_are_turns_too(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "hi there"), byte_tokenizer) as visit:
            one, client = (each := visit()), each.openai()
            stream = await client.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": "a"}], stream=True
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hi there"
            assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, "stop"]
            text = await client.completions.create(model="echo", prompt="b", max_tokens=2)
            assert (text.choices[0].text, text.choices[0].finish_reason) == ("hi", "length")
            again = await client.completions.create(model="echo", prompt="bhi and", stop="th")
            assert again.choices[0].text == "hi "
            body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3, "temperature": 0.3}}
            async with one.http.post(one.root + "/inference/v1/generate", json=body) as response:
                (choice,) = (await response.json())["choices"]
            assert choice["token_ids"] == byte_tokenizer.encode("hi ")
            assert choice["versions"] == [0, 0, 0]
            assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
            await client.close()
            turns = one.rollout.turns
            assert [turn.parent for turn in turns] == [None, None, "g12.0.1", None]
            assert {turn.sampling.temperature for turn in turns} == {1.0}

    asyncio.run(main())


def test_rewritten_prompts_are_counted_as_rewritten_chats_are(byte_tokenizer: ChatTokenizer) -> None:
    """Text with special tokens in it goes on token-exactly; other words than were said are counted, in text and
    in token ids."""

    async def main() -> None:
        async with opened(saying(byte_tokenizer, "hi"), byte_tokenizer) as visit:
            one, client = (each := visit()), each.openai()
            said = await client.completions.create(model="echo", prompt="u:q<end>a:")
            more = f"u:q<end>a:{said.choices[0].text}<end>u:more<end>a:"
            await client.completions.create(model="echo", prompt=more)
            assert [turn.parent for turn in one.rollout.turns] == [None, "g12.0.0"]
            assert one.rollout.turns[1].prompt_ids.tolist() == byte_tokenizer.encode(more)
            assert one.rollout.rewrites == {}
            await client.completions.create(model="echo", prompt="u:q<end>a:ho<end>u:more", n=2)
            assert one.rollout.rewrites == {"client": 1}
            other = visit(a_spec(1))
            first = [65, 66, 67]
            answer = [*byte_tokenizer.encode("hi"), END]
            for ids in (first, [*first, *answer, 68], [1, 2], [*first, 70, 71], [*first, *answer[:2], 68]):
                async with other.http.post(
                    other.root + "/inference/v1/generate", json={"token_ids": ids}
                ) as response:
                    assert response.status == 200
            assert [turn.parent for turn in other.rollout.turns] == [None, "g12.1.0", None, None, None]
            assert other.rollout.rewrites == {"client": 2}
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_has_a_bounded_number_of_generations(byte_tokenizer: ChatTokenizer, stream: bool) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer) as visit:
            one = visit()
            url, body = one.endpoint.base_url + "/completions", {"prompt": ["x"] * 300, "n": 4}
            async with one.http.post(url, json=body | {"stream": stream}) as response:
                assert response.status == 400
                told = (await response.json())["error"]["message"]
            assert told == "a call may ask for 256 answers, got 1200 (prompts times n); split it"
            assert (one.rollout.turns, one.rollout.rewrites) == ((), {})
            async with one.http.post(url, json=body | {"prompt": ["x"] * 64}) as response:
                assert len((await response.json())["choices"]) == 256

    asyncio.run(main())


def test_several_choices_are_turns_of_one_prompt(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> Episode:
        async with opened(saying(byte_tokenizer, "a", "b", "c"), byte_tokenizer) as visit:
            one, client = (each := visit()), each.openai()
            asked: list[Any] = [{"role": "user", "content": "x"}]
            made = await client.chat.completions.create(model="echo", messages=asked, n=3)
            assert sorted(choice.message.content or "" for choice in made.choices) == ["a", "b", "c"]
            await client.close()
            return Episode(task_id="t", turns=one.rollout.turns)

    assert len(asyncio.run(main()).samples()) == 3


def test_turns_of_another_policy_are_context(byte_tokenizer: ChatTokenizer) -> None:
    """The teacher speaks between two turns of the policy: its words are in the sample and not in the loss."""

    async def main() -> Episode:
        own = saying(byte_tokenizer, "mine", "mine again")
        teacher = saying(byte_tokenizer, "look here", policy="teacher")

        class Both(ScriptedEngine):
            async def generate(self, request: Any) -> Any:
                of = teacher if request.policy == "teacher" else own
                async for chunk in of.generate(request):
                    yield chunk

        engine = Both(lambda request: [END])
        async with opened(engine, byte_tokenizer, names={"gpt": "teacher"}) as visit:
            one, client = (each := visit()), each.openai()
            asked: list[Any] = [{"role": "user", "content": "q"}]
            for model in ("policy", "gpt", "echo"):
                made = await client.chat.completions.create(model=model, messages=asked)
                asked += [
                    {"role": "assistant", "content": made.choices[0].message.content},
                    {"role": "user", "content": "and?"},
                ]
            await client.close()
            return Episode(task_id="t", turns=one.rollout.turns)

    episode = asyncio.run(main())
    assert [turn.policy for turn in episode.turns] == ["policy", "teacher", "policy"]
    samples = {sample.policy: sample for sample in episode.samples()}
    trained = samples["policy"]
    assert byte_tokenizer.decode(trained.token_ids[trained.loss_mask].tolist()) == "minemine again"
    assert "look here" in byte_tokenizer.decode(trained.token_ids.tolist())


def test_limits_are_told_and_cut(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "12345678"), byte_tokenizer, max_context=40) as visit:
            one = visit(a_spec(max_turns=2, max_tokens=12))
            client = one.openai(max_retries=0)
            asked: list[Any] = [{"role": "user", "content": "a"}]
            first = await client.chat.completions.create(model="echo", messages=asked)
            assert first.choices[0].finish_reason == "stop"
            second = await client.chat.completions.create(model="echo", messages=asked)
            assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("123", "length")
            with pytest.raises(BadRequestError, match=r"has had its 2 turns \(rollout.max_turns\)"):
                await client.chat.completions.create(model="echo", messages=asked)
            assert one.rollout.is_limited
            other = visit(a_spec(1))
            patient = other.openai(max_retries=0)
            long: list[Any] = [{"role": "user", "content": "x" * 100}]
            with pytest.raises(BadRequestError, match="maximum context length is 40 tokens, got 116") as told:
                await patient.chat.completions.create(model="echo", messages=long)
            assert told.value.code == "context_length_exceeded"
            assert (other.rollout.is_limited, other.rollout.turns) == (True, ())
            cut = await patient.completions.create(model="echo", prompt="x" * 36, max_tokens=30)
            assert cut.choices[0].text == "1234"
            await client.close()
            await patient.close()

    asyncio.run(main())


def test_the_task_the_reward_and_what_is_wrong_with_one(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer) as visit:
            one = visit()
            url = one.endpoint.episode_url
            async with one.http.get(url) as response:
                assert await response.json() == {"id": "t", "prompt": "hello", "answer": "4"}
            async with one.http.post(
                f"{url}/reward", json={"reward": 0.5, "parts": {"style": 1}}
            ) as response:
                assert (response.status, await response.json()) == (200, {"reward": 0.5})
            assert (one.rollout.reward, one.rollout.parts) == (0.5, {"style": 1.0})
            for body in ("{}", '{"reward": "much"}', '{"reward": 1e999}', "[", '{"reward": 1, "and": 2}'):
                async with one.http.post(f"{url}/reward", data=body) as response:
                    assert response.status == 400
                    assert (await response.json())["error"]["type"] == "invalid_request_error"
            assert one.rollout.reward == 0.5

    asyncio.run(main())


def test_models_have_their_context_and_names_that_are_none_are_refused(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        names = {"gpt-5": "policy"}
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer, names=names) as visit:
            client = visit().openai(max_retries=0)
            (card,) = (await client.models.list()).data
            assert (card.id, card.model_dump()["max_model_len"]) == ("echo", 1024)
            assert (await client.models.retrieve("gpt-5")).id == "gpt-5"
            asked: list[Any] = [{"role": "user", "content": "a"}]
            assert (await client.chat.completions.create(model="gpt-5", messages=asked)).model == "gpt-5"
            with pytest.raises(
                NotFoundError, match="the model 'o9' does not exist; there are 'policy', 'echo'"
            ):
                await client.chat.completions.create(model="o9", messages=asked)
            await client.close()

    asyncio.run(main())


def test_a_key_that_is_unknown_or_expired_is_told_so_and_others_go_on(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer) as visit:
            over, other = visit(), visit(a_spec(1))
            over.door.dismiss(over.endpoint)
            over.door.dismiss(over.endpoint)
            stranger = other.openai(max_retries=0).with_options(api_key="pk-guess")
            late = over.openai(max_retries=0)
            asked: list[Any] = [{"role": "user", "content": "a"}]
            with pytest.raises(AuthenticationError, match="unknown episode key"):
                await stranger.chat.completions.create(model="echo", messages=asked)
            with pytest.raises(AuthenticationError, match="the episode of this key is over"):
                await late.chat.completions.create(model="echo", messages=asked)
            async with over.http.post(over.endpoint.episode_url + "/reward", json={"reward": 1}) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (401, "expired_key")
            well = other.openai()
            assert (await well.chat.completions.create(model="echo", messages=asked)).choices
            assert (over.rollout.turns, len(other.rollout.turns)) == ((), 1)
            for client in (stranger, late, well):
                await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("body", [b"not JSON", b"[1]", b"\xff\xfe", b'{"messages": 3}', b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(byte_tokenizer: ChatTokenizer, body: bytes) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer) as visit:
            one = visit()
            async with one.http.post(one.endpoint.base_url + "/chat/completions", data=body) as response:
                assert response.status == 400
                assert "body" in (await response.json())["error"]["message"]
            assert one.rollout.turns == ()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [2**40]}),
        ("/inference/v1/generate", {"token_ids": [2**40]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": 5}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tokenize": False}},
        ),
    ],
)
def test_a_clients_mistake_is_no_failure_of_the_server(
    byte_tokenizer: ChatTokenizer, path: str, body: dict[str, Any]
) -> None:
    """OpenAI's clients send what failed with 500 again."""

    async def main() -> None:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer) as visit:
            one = visit()
            async with one.http.post(one.root + path, json=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "invalid_request_error"
            assert (one.rollout.turns, one.rollout.engine_error) == ((), None)

    asyncio.run(main())


def test_what_is_not_there_is_refused_in_openais_shape(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> dict[str, Any]:
        async with opened(saying(byte_tokenizer, "x"), byte_tokenizer) as visit:
            one = visit()
            async with one.http.post(one.endpoint.base_url + "/responses", json={}) as response:
                assert response.status == 404
                return dict(json.loads(await response.text())["error"])

    assert "/v1/responses is not served here; there are: /{episode}/" in asyncio.run(main())["message"]


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
            reason = "stop" if number == 2 else None
            yield make_chunk(ids, versions=number, restarts=number == 1, finish_reason=reason)
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
