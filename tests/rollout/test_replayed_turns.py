"""A turn that was asked for before a restart is answered from what was kept of it, and goes on from there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec

from penstock.engines.scripted import ScriptedEngine
from penstock.records import Chunk, GenerateRequest, PartialGroup, TurnPart, WorkProgressed
from penstock.rollout.replayed_turns import ReplayedTurns
from tests.engines.contract import ask, collect, joined
from tests.records.builders import make_chunk


class Notes:
    """`WorkLog` that only remembers."""

    def __init__(self) -> None:
        self.parts: list[TurnPart] = []

    def append(self, record: WorkProgressed) -> None:
        self.parts += record.turns

    def known(self) -> dict[int, PartialGroup]:
        groups: dict[int, PartialGroup] = {}
        for part in self.parts:
            groups.setdefault(part.group, PartialGroup()).add_part(part)
        return groups


def counting(version: int = 0) -> ScriptedEngine:
    return ScriptedEngine(lambda request: range(10, 60), max_context=64, version=version)


def asked(request_id: str = "g7.1.0", prompt: list[int] | None = None, **options: object) -> GenerateRequest:
    return ask(request_id, prompt, max_tokens=6, chunk_tokens=2, **options)


def broken_off(request: GenerateRequest, after: int = 2) -> Notes:
    """What was kept of a request whose process ended after so many chunks."""
    notes = Notes()

    async def main() -> None:
        async with aclosing(ReplayedTurns(counting(), notes).generate(request)) as chunks:  # type: ignore[type-var]
            for _ in range(after):
                await anext(chunks)

    asyncio.run(main())
    return notes


def gone_on(
    notes: Notes, request: GenerateRequest, **options: object
) -> tuple[list[Chunk], ScriptedEngine, ReplayedTurns]:
    engine = counting(version=3)
    turns = ReplayedTurns(engine, notes, known=notes.known(), **options)  # type: ignore[arg-type]
    return asyncio.run(collect(turns.generate(request))), engine, turns


def test_a_turn_under_way_goes_on_after_its_last_kept_token() -> None:
    chunks, engine, turns = gone_on(broken_off(asked()), asked())
    assert joined(chunks) == [10, 11, 12, 13, 14, 15]
    assert [int(v) for chunk in chunks for v in chunk.versions] == [0, 0, 0, 0, 3, 3]
    assert chunks[-1].finish_reason == "length"
    (request,) = engine.requests
    assert (request.num_resumed, request.token_ids.tolist()) == (4, [1, 2, 3, 10, 11, 12, 13])
    assert turns.counts == {"resumed_turns": 1, "resumed_tokens": 4}


def test_what_goes_on_is_kept_too() -> None:
    notes = broken_off(asked())
    gone_on(notes, asked())
    assert [(part.start, part.end) for part in notes.parts] == [(0, 2), (2, 4), (4, 6)]
    chunks, engine, _ = gone_on(notes, asked())
    assert joined(chunks) == [10, 11, 12, 13, 14, 15]
    assert engine.requests == []


class BeginsAnew(ScriptedEngine):
    """Its second chunk is the first of another try."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        for number, token in enumerate([10, 20, 21]):
            yield make_chunk([token], finish_reason="stop" if number == 2 else None, restarts=number == 1)


def test_of_an_answer_that_began_anew_the_last_try_is_kept() -> None:
    """What is kept is where the answer begins: nothing comes before it that it could take back."""
    notes = Notes()
    asyncio.run(
        collect(ReplayedTurns(BeginsAnew(lambda request: (), max_context=64), notes).generate(asked()))
    )
    assert [(part.start, part.end, part.chunk.restarts) for part in notes.parts] == [
        (0, 1, False),
        (0, 1, False),
        (1, 2, False),
    ]
    (kept,) = notes.known()[7].turns.values()
    assert [int(token) for part in kept for token in part.chunk.token_ids] == [20, 21]


def test_a_workflow_that_took_another_way_generates_afresh() -> None:
    said: list[str] = []
    notes = broken_off(asked(prompt=[1, 2]))
    chunks, engine, turns = gone_on(notes, asked(prompt=[1, 3]), say=said.append)
    assert joined(chunks) == [10, 11, 12, 13, 14, 15]
    assert engine.requests[0].num_resumed == 0
    assert turns.counts == {"diverged_turns": 1}
    assert len(said) == 1 and "turn 0 of episode g7.1" in said[0]


def test_where_an_answer_has_one_version_only_whole_turns_are_answered() -> None:
    chunks, engine, _ = gone_on(broken_off(asked()), asked(), resumes=False)
    assert [int(v) for chunk in chunks for v in chunk.versions] == [3] * 6
    _, engine, _ = gone_on(broken_off(asked(), after=3), asked(), resumes=False)
    assert engine.requests == []


def test_tokens_whose_masks_have_not_come_are_not_kept() -> None:
    assert broken_off(asked(top_k=3, record_sampling_mask=True)).parts == []


def test_evaluations_are_not_kept() -> None:
    assert broken_off(asked("e-7.1.0")).parts == []


def test_a_turn_of_which_only_the_end_was_not_kept_is_ended() -> None:
    notes = broken_off(asked(), after=3)
    last = notes.parts[-1]
    notes.parts[-1] = msgspec.structs.replace(
        last, chunk=msgspec.structs.replace(last.chunk, finish_reason=None)
    )
    chunks, engine, _ = gone_on(notes, asked())
    assert joined(chunks) == [10, 11, 12, 13, 14, 15]
    assert (chunks[-1].finish_reason, engine.requests) == ("length", [])
