"""What is left of a journal, and what stands for the rest, is the same as all of it, for any history."""

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.durability.journal_segments import JournalSegments
from penstock.loop.attempt_records import (
    AttemptRecord,
    CheckpointKept,
    GroupDropped,
    GroupsTrained,
    RunResumed,
    VersionIssued,
)
from penstock.loop.attempts import Attempts
from tests.loop.test_attempts import admitted, ended, finished


def history(rng: random.Random, length: int) -> list[AttemptRecord]:
    """A legal one, drawn at random."""
    attempts, records, step, kept = Attempts(), [], 0, 0
    for _ in range(length):
        running = list(attempts.under_way)
        ready = [number for number, one in attempts.by_number.items() if one.state == "scored"]
        draw = rng.random()
        record: AttemptRecord = admitted(attempts.standing.num_admitted)
        if draw < 0.1 and running:
            record = ended(rng.choice(running), rng.randrange(2))
        elif draw < 0.3 and running:
            record = finished(rng.choice(running))
        elif draw < 0.5 and len(ready) >= 2:
            record = GroupsTrained(step=(step := step + 1), numbers=tuple(rng.sample(ready, 2)))
        elif draw < 0.6 and running + ready:
            number = rng.choice(running + ready)
            record = rng.choice(
                [
                    GroupDropped(number=number, reason="stale", returns=f"t{number}"),
                    GroupDropped(number=number, reason="empty"),
                ]
            )
        elif draw < 0.65:
            record = CheckpointKept(step=(kept := step))
        elif draw < 0.7:
            record = RunResumed(step=(step := rng.randint(kept, step)))
        elif draw < 0.75:
            record = VersionIssued(version=0, step=step)
        attempts.apply(record)
        records.append(record)
    return records


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), per_segment=st.integers(2, 9), per_commit=st.integers(1, 5))
def test_what_is_left_says_the_same(seed: int, per_segment: int, per_commit: int) -> None:
    """Records count at once and are written a commit later; a crash that loses those on their way changes
    nothing."""
    rng = random.Random(seed)
    records = history(rng, 60)
    live, first, forgotten = Attempts(), 1, None
    segments = JournalSegments(live, first)
    on_disk: list[tuple[int, AttemptRecord]] = []
    pending: list[AttemptRecord] = []
    before = live.standing
    for record in records:
        live.apply(record)
        pending.append(record)
        is_kept = isinstance(record, CheckpointKept)
        if is_kept or len(pending) >= per_commit:
            segment = 1 + len(on_disk) // per_segment
            segments.written(pending, segment, before)
            on_disk += [(segment, one) for one in pending]
            pending, before = [], live.standing
        if isinstance(record, CheckpointKept):
            found = segments.forget_before(record.step, pending=())
            first, forgotten = found or (first, forgotten)
    again, whole = Attempts(forgotten), Attempts()
    for segment, record in on_disk:
        whole.apply(record)
        if segment >= first:
            again.apply(record)
    assert msgspec.structs.asdict(again.standing) == msgspec.structs.asdict(whole.standing)
    assert (again.counts(), again.drops()) == (whole.counts(), whole.drops())
    for number, one in again.by_number.items():
        assert (one.state, one.step) == (whole.by_number[number].state, whole.by_number[number].step)


def test_a_group_whose_end_is_not_on_the_disk_keeps_its_segment() -> None:
    """A crash would make it what it was: its task would be lost with its segment."""
    attempts = Attempts()
    segments = JournalSegments(attempts, 1)
    for segment, number in ((1, 0), (2, 1), (3, 2)):
        before = attempts.standing
        attempts.apply(admitted(number))
        segments.written((admitted(number),), segment, before)
    attempts.apply(GroupDropped(number=0, reason="stale", returns="t0"))
    assert segments.forget_before(0, pending={0}) is None
    found = segments.forget_before(0, pending=())
    assert found is not None
    assert (found[0], found[1].dropped, list(attempts.by_number)) == (2, {"stale": 1}, [1, 2])
