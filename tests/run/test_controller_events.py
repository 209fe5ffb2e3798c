import asyncio

import pytest

from penstock.loop.admission import StalenessGate, StepGroups, Ticket
from penstock.loop.attempt_records import GroupDropped, GroupGenerated, scored_record
from penstock.loop.attempts import Attempt, Attempts
from penstock.observe.event_stream import EventStream
from penstock.observe.events import Span
from penstock.observe.readers import MemoryReader
from penstock.run.controller_events import ControllerEvents, waits_of
from tests.loop.test_admission import scored
from tests.loop.test_attempts import admitted
from tests.observe.examples import HandClock
from tests.run.test_step_answers import ready


def events_of(
    stream: EventStream, gate: StalenessGate, attempts: Attempts, *, has_journal: bool = False
) -> ControllerEvents:
    """Without advantages and texts."""
    return ControllerEvents(
        stream,
        gate,
        attempts,
        advantages=lambda groups: None,
        decode=lambda token_ids: "",
        has_journal=has_journal,
    )


def attempt(began_s: float | None, generated_s: float | None, scored_s: float | None) -> Attempt:
    ticket = Ticket(number=0, bound=1, deadline=1)
    return Attempt(ticket, "t", began_s=began_s, generated_s=generated_s, scored_s=scored_s)


FIRST, SECOND, OF_EARLIER = attempt(0.0, 4.0, 5.0), attempt(6.0, 8.0, 9.0), attempt(None, None, None)


@pytest.mark.parametrize(
    ("groups", "start", "end", "waits"),
    [
        ((FIRST, SECOND), 5.0, 10.0, {"admission": 1.0, "generation": 2.0, "scoring": 1.0, "journal": 1.0}),
        ((FIRST, SECOND), 7.0, 9.0, {"generation": 1.0, "scoring": 1.0}),
        ((FIRST,), 1.0, 4.5, {"generation": 3.0, "scoring": 0.5}),
        ((FIRST,), 3.0, 3.0, {}),
        ((OF_EARLIER,), 3.0, 4.0, {"generation": 1.0}),
    ],
)
def test_a_wait_is_for_what_the_last_group_was_doing(groups, start, end, waits) -> None:
    assert waits_of(groups, start, end, "journal") == waits
    assert sum(waits.values()) == end - start


@pytest.mark.parametrize("has_journal", [True, False])
def test_only_a_run_with_a_journal_waits_for_one(has_journal: bool) -> None:
    attempts, clock = Attempts(), HandClock()
    attempts.follow(clock.time)
    gate = StalenessGate(groups_per_step=1, max_staleness=1, late="correct")
    told = events_of(EventStream(clock), gate, attempts, has_journal=has_journal)
    for at, record in (
        (1.0, admitted(0)),
        (6.0, GroupGenerated(number=0)),
        (8.0, scored_record(0, scored(0, [0]), None)),
    ):
        clock.now = at
        attempts.apply(record)
    clock.now = 10.0
    waits = told.waited(7.0, StepGroups(step=0, groups=(ready(0, [0]),)))
    assert waits == {"scoring": 1.0, "journal" if has_journal else "controller": 2.0}


def test_groups_that_wait_at_the_same_time_have_a_track_each() -> None:
    attempts, reader = Attempts(), MemoryReader()

    async def main() -> None:
        stream = EventStream(asyncio.get_running_loop())
        stream.subscribe("memory", reader)
        attempts.follow(asyncio.get_running_loop().time)
        gate = StalenessGate(groups_per_step=1, max_staleness=1, late="correct")
        gate.history.issue(0)
        told = events_of(stream, gate, attempts)
        for number, leaves in enumerate([False, True, False]):
            attempts.apply(admitted(number))
            attempts.apply(GroupGenerated(number=number))
            attempts.apply(scored_record(number, scored(number, [0]), None))
            if leaves:
                told.dropped(scored(0, [0]).group, "stale", "")
        for number in (1, 2):
            told.dropped(scored(number, [0]).group, "stale", "")

    asyncio.run(main())
    spans = [event for event in reader.events if isinstance(event, Span)]
    tracks = {span.attributes["group"]: span.track for span in spans if span.name == "ready"}
    assert tracks == {0: "ready 0", 1: "ready 1", 2: "ready 0"}
    assert {span.track for span in spans if span.name in ("generate", "score")} == {"slot 0"}


def test_a_group_that_is_dropped_leaves_its_stage_and_its_track() -> None:
    attempts, reader, now = Attempts(), MemoryReader(), [0.0]

    async def main() -> None:
        stream = EventStream(asyncio.get_running_loop())
        stream.subscribe("memory", reader)
        attempts.follow(lambda: now[0])
        events_of(stream, StalenessGate(groups_per_step=1, max_staleness=1, late="correct"), attempts)
        for number in (0, 1):
            attempts.apply(admitted(number))
        attempts.apply(GroupGenerated(number=1))
        for number in (0, 1):
            attempts.apply(GroupDropped(number=number, reason="timeout"))
        attempts.apply(admitted(2))
        attempts.apply(GroupGenerated(number=2))

    asyncio.run(main())
    spans = [event for event in reader.events if isinstance(event, Span)]
    assert [(span.name, span.track, span.attributes["group"]) for span in spans] == [
        ("generate", "slot 1", 1),
        ("generate", "slot 0", 0),
        ("score", "slot 1", 1),
        ("generate", "slot 0", 2),
    ]
