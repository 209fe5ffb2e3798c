"""Calls that come twice, and answers that nobody was there for."""

import asyncio
from typing import Any

import aiohttp
import pytest

from penstock.models.tokenizer import ChatTokenizer
from penstock.records import Chunk
from penstock.rollout.episode_rollout import Rollout
from penstock.serve.agents.episode_session import MAX_CALLS_AT_ONCE, EpisodeSession, LiveAnswer, Made, call_id
from penstock.serve.api_error import ApiError
from tests.records.builders import make_chunk
from tests.serve.agents.doors import Visit, a_spec, opened, saying


def a_chunk(token: int) -> Chunk:
    return make_chunk([token], logprobs=token, versions=token)


async def heard(live: LiveAnswer) -> list[tuple[int, int]]:
    return [(choice, int(chunk.token_ids[0])) async for choice, chunk in live.follow()]


def test_who_comes_later_hears_all_of_it() -> None:
    async def main() -> None:
        live = LiveAnswer()
        first = asyncio.create_task(heard(live))
        live.push(0, a_chunk(5))
        live.push(1, a_chunk(6))
        second = asyncio.create_task(heard(live))
        for _ in range(4):
            await asyncio.sleep(0)
        live.push(0, a_chunk(7))
        for _ in range(4):
            await asyncio.sleep(0)
        live.end()
        live.end()
        assert await first == await second == [(0, 5), (1, 6), (0, 7)]

    asyncio.run(main())


def test_after_the_end_there_is_nothing_to_hear() -> None:
    async def main() -> None:
        live = LiveAnswer()
        live.push(0, a_chunk(5))
        live.end()
        assert await heard(live) == []

    asyncio.run(main())


BODY = {"model": "echo", "messages": [{"role": "user", "content": "a"}]}


class Gate:
    """The engine's `sleep`: nothing is sampled before it is opened."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.reached.set()
        await self.opened.wait()


async def post(one: Visit, **headers: str) -> dict[str, Any]:
    url = one.endpoint.base_url + "/chat/completions"
    async with one.http.post(url, json=BODY, headers=headers) as response:
        return dict(await response.json())


async def leave(one: Visit, gate: Gate) -> None:
    """Ask, and give up while the engine is at it."""
    asking = asyncio.create_task(post(one))
    await gate.reached.wait()
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()


def test_who_asks_again_after_giving_up_gets_the_turn_that_was_made(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        gate = Gate()
        async with opened(saying(byte_tokenizer, "1", "2", sleep=gate), byte_tokenizer) as visit:
            one = visit()
            await leave(one, gate)
            again = asyncio.create_task(post(one))
            gate.opened.set()
            assert (await again)["choices"][0]["message"]["content"] == "1"
            assert [turn.text for turn in one.rollout.turns] == ["1"]
            # The answer has arrived: the same words once more are a call of their own.
            assert (await post(one))["choices"][0]["message"]["content"] == "2"
            assert len(one.rollout.turns) == 2

    asyncio.run(main())


@pytest.mark.parametrize("header", ["X-Stainless-Retry-Count", "Idempotency-Key"])
def test_a_client_that_says_so_is_answered_twice_from_one_turn(
    byte_tokenizer: ChatTokenizer, header: str
) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "1", "2"), byte_tokenizer) as visit:
            one = visit()
            first = await post(one, **({header: "k"} if header == "Idempotency-Key" else {}))
            again = await post(one, **{header: "k" if header == "Idempotency-Key" else "1"})
            assert again == first
            assert len(one.rollout.turns) == 1

    asyncio.run(main())


def test_calls_at_once_with_the_same_words_are_two_turns(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "1", "2"), byte_tokenizer) as visit:
            one = visit()
            answers = await asyncio.gather(post(one), post(one))
            said = sorted(answer["choices"][0]["message"]["content"] for answer in answers)
            assert said == ["1", "2"]
            assert len(one.rollout.turns) == 2

    asyncio.run(main())


def test_a_turn_that_nobody_was_sent_is_no_part_of_the_episode(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        gate = Gate()
        engine = saying(byte_tokenizer, "1", sleep=gate)
        async with opened(engine, byte_tokenizer) as visit:
            one = visit()
            await leave(one, gate)
            gate.opened.set()
            await post(visit(a_spec(1)))  # comes after it in every queue
            assert (len(engine.requests), one.rollout.turns) == (2, ())

    asyncio.run(main())


def test_the_end_of_an_episode_ends_its_calls(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        gate = Gate()
        engine = saying(byte_tokenizer, "1", sleep=gate)
        async with opened(engine, byte_tokenizer) as visit:
            one, other = visit(), visit(a_spec(1))
            waiting = asyncio.create_task(post(one))
            await gate.reached.wait()
            one.door.dismiss(one.endpoint)
            assert (await waiting)["error"]["code"] == "expired_key"
            gate.opened.set()
            assert (await post(other))["choices"][0]["message"]["content"] == "1"
            assert (await engine.report()).num_running == 0

    asyncio.run(main())


def test_what_failed_is_tried_anew(byte_tokenizer: ChatTokenizer) -> None:
    """A refusal of the engine is no answer that a retry could be given."""

    async def main() -> None:
        engine = saying(byte_tokenizer, "1", max_context=4)
        async with opened(engine, byte_tokenizer) as visit:
            one = visit()
            for _ in range(2):
                assert "was refused" in (await post(one, **{"Idempotency-Key": "k"}))["error"]["message"]
            assert one.rollout.turns == ()

    asyncio.run(main())


def test_an_episode_can_only_have_so_many_calls_at_once(byte_tokenizer: ChatTokenizer) -> None:
    async def main() -> None:
        gate = Gate()
        async with opened(saying(byte_tokenizer, "1", sleep=gate), byte_tokenizer) as visit:
            one, other = visit(), visit(a_spec(1))
            async with aiohttp.ClientSession(
                headers=one.http.headers, connector=aiohttp.TCPConnector(limit=0)
            ) as http:
                one.http = http
                calls = [asyncio.create_task(post(one)) for _ in range(MAX_CALLS_AT_ONCE + 3)]
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                gate.opened.set()
                errors = [answer["error"] for answer in await asyncio.gather(*calls) if "error" in answer]
                assert [error["type"] for error in errors] == ["rate_limit_error"] * 3
                assert (await post(other))["choices"]
            assert len(one.rollout.turns) == MAX_CALLS_AT_ONCE

    asyncio.run(main())


def test_answers_at_once_are_bounded_over_all_calls(byte_tokenizer: ChatTokenizer) -> None:
    rollout = Rollout(a_spec(), saying(byte_tokenizer, "1"), byte_tokenizer)
    session = EpisodeSession(rollout, max_context=64)
    with session.places(200):
        with pytest.raises(ApiError, match="200 answers .* and 57 more are asked for, 256 at once") as told:
            session.places(57).__enter__()
        assert told.value.status == 429
        with session.places(56):
            pass
    with session.places(256):
        pass


def test_a_call_is_known_by_its_words_and_its_path() -> None:
    one = call_id("/a", b"x", {})
    assert one == call_id("/a", b"x", {"X-Stainless-Retry-Count": "0"})
    assert one.name not in (call_id("/b", b"x", {}).name, call_id("/a", b"y", {}).name)
    assert (one.is_retry, call_id("/a", b"x", {"X-Stainless-Retry-Count": "2"}).is_retry) == (False, True)


def test_an_answer_whose_sending_breaks_off_is_no_part_of_the_episode_until_it_is_sent(
    byte_tokenizer: ChatTokenizer,
) -> None:
    async def main() -> None:
        async with opened(saying(byte_tokenizer, "1"), byte_tokenizer) as visit:
            one = visit()
            session = one.door.keys.session(one.endpoint.api_key)

            async def make(live: LiveAnswer) -> Made:
                return Made({}, (await session.generate([1, 2], policy="policy", limit=3, stop=()),))

            with session.listening(call_id("/x", b"", {}), make) as call:
                await session.answered(call)
                with pytest.raises(ConnectionResetError), session.delivering(call):
                    raise ConnectionResetError
            assert (one.rollout.turns, session.num_unread) == ((), 1)
            with session.listening(call_id("/x", b"", {}), make) as again, session.delivering(again):
                assert again is call
            with pytest.raises(ConnectionResetError), session.delivering(call):
                raise ConnectionResetError  # it has arrived once
            assert (len(one.rollout.turns), session.num_unread) == (1, 0)

    asyncio.run(main())
