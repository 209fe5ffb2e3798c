"""A ledger that followed a journal and one that was made anew from it are the same, for any history."""

import random
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.buffer.admission import Ticket
from penstock.buffer.ledger import Ledger, LedgerCounts, rows_of
from penstock.buffer.life_records import (
    CheckpointKept,
    EpisodeEnded,
    GroupAdmitted,
    GroupDropped,
    GroupsTrained,
    LifeRecord,
    RunResumed,
    VersionIssued,
    from_bytes,
    scored_record,
    to_bytes,
)
from penstock.buffer.lives import UNDER_WAY, Lives
from penstock.types import Episode
from tests.buffer.test_admission import scored


def admitted(number: int, num_taken: int | None = None) -> GroupAdmitted:
    return GroupAdmitted(
        ticket=Ticket(number=number, bound=2, deadline=2),
        task_id=f"t{number}",
        prompt="p",
        num_taken=number + 1 if num_taken is None else num_taken,
        size=2,
    )


def ended(number: int, index: int) -> EpisodeEnded:
    return EpisodeEnded(number=number, episode=Episode(task_id=f"t{number}", turns=(), index=index))


def finished(number: int) -> LifeRecord:
    return scored_record(number, scored(number, [0]), None)


def history(rng: random.Random, length: int) -> list[LifeRecord]:
    """A legal one, drawn at random."""
    lives, records, step, kept = Lives(), [], 0, 0
    for _ in range(length):
        by_state: dict[str, list[int]] = {}
        for number, life in lives.by_number.items():
            by_state.setdefault(life.state, []).append(number)
        running = [number for state in UNDER_WAY for number in by_state.get(state, [])]
        ready = by_state.get("scored", [])
        draw = rng.random()
        record: LifeRecord = admitted(lives.standing.num_admitted)
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
            record = VersionIssued(version=len(lives.standing.version_steps), step=step)
        lives.apply(record)
        records.append(record)
    return records


def replayed(records: list[LifeRecord], segments: list[int], lives: Lives) -> Lives:
    for record, segment in zip(records, segments, strict=True):
        lives.apply(from_bytes(to_bytes(record)), segment)
    return lives


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), per_segment=st.integers(2, 9), collects=st.booleans())
def test_made_anew_it_is_the_same(
    seed: int, per_segment: int, collects: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    records = history(random.Random(seed), 60)
    segments = [1 + index // per_segment for index in range(len(records))]
    ledger, first = Ledger(folder / "followed", Lives(), 0), 1
    for sequence, (record, segment) in enumerate(zip(records, segments, strict=True), start=1):
        ledger.apply([record], segment, sequence)
        if collects and isinstance(record, CheckpointKept):
            first, gone = ledger.lives.forget_before(record.step)
            ledger.forget(gone)
    left = [index for index, segment in enumerate(segments) if segment >= first]
    forgotten = ledger.lives.forgotten if first > 1 else None
    lives = replayed([records[i] for i in left], [segments[i] for i in left], Lives(forgotten))
    anew = Ledger(folder / "anew", lives, len(records))
    assert _plain(lives) == _plain(ledger.lives)
    anew.close()
    ledger.close()
    assert rows_of(folder / "followed") == rows_of(folder / "anew")
    one, other = LedgerCounts(folder / "followed"), LedgerCounts(folder / "anew")
    assert (one.states, one.drops, one.oldest) == (other.states, other.drops, other.oldest)
    whole = replayed(records, segments, Lives())
    assert (one.states, one.drops) == (whole.counts(), whole.drops())


def _plain(lives: Lives) -> tuple[object, ...]:
    standing = lives.standing
    return (
        standing.num_admitted,
        standing.num_taken,
        standing.returned,
        standing.version_steps,
        standing.step,
        lives.counts(),
    )


def test_one_that_followed_is_kept_and_one_that_is_behind_or_broken_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path, replayed([admitted(0)], [1], Lives()), 1).close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE attempts SET task = 'as it was'")
    database.close()
    Ledger(path, replayed([admitted(0)], [1], Lives()), 1).close()
    assert [row[1] for row in rows_of(path)] == ["as it was"]
    Ledger(path, replayed([admitted(0), admitted(1)], [1, 1], Lives()), 2).close()
    assert [row[1] for row in rows_of(path)] == ["t0", "t1"]
    path.write_bytes(b"no database at all" * 100)
    Ledger(path, replayed([admitted(0)], [1], Lives()), 1).close()
    assert [row[1] for row in rows_of(path)] == ["t0"]


def test_what_cannot_follow_raises_and_changes_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", Lives(), 0)
    ledger.apply([admitted(0)], 1, 1)
    with pytest.raises(ValueError, match="group 0 is issued, so it can't become trained"):
        ledger.apply([GroupsTrained(step=1, numbers=(0,))], 1, 2)
    ledger.close()
    assert LedgerCounts(tmp_path / "ledger").states == Counter(issued=1)


def test_one_that_could_not_be_written_never_says_that_it_has_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is let go, and made anew of everything once some commits have passed."""
    monkeypatch.setattr("penstock.buffer.ledger.COMMITS_BEFORE_ANEW", 2)
    path = tmp_path / "ledger"
    ledger = Ledger(path, Lives(), 0)
    ledger.apply([admitted(0)], 1, 1)
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE attempts")
    other.close()
    with pytest.raises(sqlite3.Error, match="no such table: attempts"):
        ledger.apply([admitted(1)], 1, 2)
    ledger.apply([admitted(2)], 1, 3)
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT sequence FROM applied").fetchone() == (1,)
    other.close()
    ledger.apply([admitted(3)], 1, 4)
    ledger.apply([admitted(4)], 1, 5)
    ledger.close()
    assert [row[0] for row in rows_of(path)] == [0, 1, 2, 3, 4]
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT sequence FROM applied").fetchone() == (5,)
    other.close()
