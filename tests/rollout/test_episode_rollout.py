"""What a workflow can ask of its rollout."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from penstock.engines.scripted import ScriptedEngine
from penstock.errors import UserError
from penstock.records import Chunk, GenerateRequest, Message, Parent, Turn
from penstock.rollout.episode_rollout import Rollout
from tests.records.builders import make_chunk
from tests.rollout.contract import spec_of


class Letters:
    """One token a character. A chat is its messages in brackets, an answer ends with `]`."""

    stop_token_ids = (ord("]"),)

    def encode_prompt(self, prompt: str | tuple[Message, ...]) -> list[int]:
        if isinstance(prompt, str):
            return [ord("^"), *self.encode(prompt)]
        return [
            *self.encode("".join(f"[{message.role[0]}{message.content}]" for message in prompt)),
            ord("["),
        ]

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_reply(self, messages: tuple[Message, ...], *, after: int | None) -> list[int]:
        closing = [] if after == ord("]") else [ord("]")]
        return [*closing, *self.encode_prompt(messages)]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids)).rstrip("]")


Work = Callable[[Rollout], Awaitable[Any]]


def run(work: Work, answer: str = "no]") -> tuple[Any, ScriptedEngine]:
    engine = ScriptedEngine(lambda request: [ord(letter) for letter in answer])

    async def main() -> Any:
        return await work(Rollout(spec_of(), engine, Letters()))

    return asyncio.run(main()), engine


def text_of(turn: Turn) -> str:
    return "".join(map(chr, turn.prompt_ids))


@pytest.mark.parametrize(
    ("context", "tokens"),
    [
        ("hi", "^hi"),
        ([{"role": "user", "content": "hi"}], "[uhi]["),
        ((Message(role="system", content="s"), Message(role="user", content="hi")), "[ss][uhi]["),
        ([104, 105], "hi"),
    ],
)
def test_a_context_is_text_or_messages_or_ids(context: Any, tokens: str) -> None:
    turn, _ = run(lambda rollout: rollout.generate(context))
    assert text_of(turn) == tokens
    assert (turn.text, turn.finish_reason, turn.id) == ("no", "stop", "g12.0.0")


def test_text_is_appended_to_what_was_sampled() -> None:
    async def work(rollout: Rollout) -> Turn:
        first = await rollout.generate("hi")
        return await rollout.generate(rollout.continue_(first, "?"))

    assert text_of(run(work)[0]) == "^hino]?"


@pytest.mark.parametrize(("max_tokens", "tokens"), [(8, "[uhi][no][uyes]["), (2, "[uhi][no][uyes][")])
def test_messages_are_appended_whether_the_answer_was_closed_or_cut(max_tokens: int, tokens: str) -> None:
    async def work(rollout: Rollout) -> Turn:
        first = await rollout.generate([{"role": "user", "content": "hi"}], max_tokens=max_tokens)
        return await rollout.generate(rollout.continue_(first, [{"role": "user", "content": "yes"}]))

    assert text_of(run(work)[0]) == tokens


def test_a_continuation_names_its_parent_so_that_the_engine_goes_on_from_its_cache() -> None:
    async def work(rollout: Rollout) -> None:
        first = await rollout.generate("hi")
        second = await rollout.generate(rollout.continue_(first, "?"))
        await rollout.generate(rollout.continue_(second, "!"))
        await rollout.generate("hello", parent=first)
        await rollout.generate("hello")
        await rollout.generate([*first.token_ids, 1], policy="policy", parent=second)

    _, engine = run(work)
    assert [request.parent for request in engine.requests] == [
        None,
        Parent(id="g12.0.0", keep=6),
        Parent(id="g12.0.1", keep=10),
        Parent(id="g12.0.0", keep=2),
        None,
        Parent(id="g12.0.1", keep=6),
    ]


def test_every_turn_has_an_id_a_seed_and_the_groups_priority() -> None:
    async def work(rollout: Rollout) -> None:
        for _ in range(3):
            await rollout.generate("hi")

    requests = run(work)[1].requests
    assert [request.id for request in requests] == ["g12.0.0", "g12.0.1", "g12.0.2"]
    assert len({request.sampling.seed for request in requests}) == 3
    assert {request.priority for request in requests} == {12}


def test_a_turn_that_began_again_holds_what_came_since() -> None:
    class Retries:
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            for text, version, restarts in (("ab", 1, False), ("c", 2, True), ("d]", 2, False)):
                yield make_chunk(
                    [ord(letter) for letter in text],
                    logprobs=-0.5,
                    versions=version,
                    finish_reason="stop" if text.endswith("]") else None,
                    restarts=restarts,
                )

    turn = asyncio.run(Rollout(spec_of(), Retries(), Letters()).generate("hi"))
    assert turn.text == "cd"
    assert turn.versions.tolist() == [2, 2, 2]


def test_sampling_is_overridden_for_one_turn() -> None:
    async def work(rollout: Rollout) -> None:
        await rollout.generate("hi", max_tokens=1, top_k=2)
        await rollout.generate("hi")

    first, second = run(work)[1].requests
    assert (first.sampling.max_tokens, first.sampling.top_k, first.record_sampling_mask) == (1, 2, True)
    assert (second.sampling.max_tokens, second.sampling.top_k, second.record_sampling_mask) == (8, 0, False)


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="no sampling setting 'max_token'; did you mean 'max_tokens'"):
        run(lambda rollout: rollout.generate("hi", max_token=3))


def test_greedy_tokens_of_the_trained_policy_are_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be > 0, got 0: greedy tokens"):
        run(lambda rollout: rollout.generate("hi", temperature=0))


def test_another_policy_is_asked_under_its_name_and_is_never_a_parent() -> None:
    async def work(rollout: Rollout) -> Turn:
        first = await rollout.generate("hi")
        return await rollout.generate(first.token_ids, policy="judge", temperature=0)

    engine = ScriptedEngine(lambda request: [1], policy="policy")
    engine._check = lambda request: None  # type: ignore[method-assign]

    async def main() -> Turn:
        return await work(Rollout(spec_of(), engine, Letters()))

    turn = asyncio.run(main())
    assert (turn.policy, turn.parent, engine.requests[1].policy) == ("judge", None, "judge")


def test_what_the_trainer_cant_replay_is_refused_for_one_turn_too() -> None:
    with pytest.raises(
        UserError, match="can't be sampled with presence_penalty: the trainer can't replay it"
    ):
        run(lambda rollout: rollout.generate("hi", presence_penalty=0.5))
