"""One record every few seconds, of what no other record says."""

import asyncio
from collections.abc import Callable

from penstock.durability.pending_work import PendingWork
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import CallAnswer, EpisodeScore, Score, TurnPart, WorkProgressed
from tests.records.test_answers import mask
from tests.records.test_partial_work import part


def kept_after(work: Callable[[PendingWork], None], wait_s: float = 3.0) -> list[WorkProgressed]:
    kept: list[WorkProgressed] = []

    async def main() -> None:
        pending = PendingWork(kept.append, every_s=2.0)
        work(pending)
        await asyncio.sleep(wait_s)
        pending.close()

    run_in_virtual_time(main())
    return kept


def turn(piece: TurnPart) -> WorkProgressed:
    return WorkProgressed(turns=(piece,))


def score(group: int, episode: int) -> WorkProgressed:
    return WorkProgressed(scores=(EpisodeScore(group=group, episode=episode, score=Score(value=1.0)),))


def test_pieces_of_a_turn_become_one() -> None:
    def work(pending: PendingWork) -> None:
        pending.add(turn(part(0, 1, 2)))
        pending.add(turn(part(2, 3)))
        pending.add(turn(part(0, 9, episode=1)))
        pending.add(score(3, 2))
        answer = CallAnswer(group=3, episode=0, call=0, key=b"k", answer=b"1")
        pending.add(WorkProgressed(calls=(answer,)))

    (record,) = kept_after(work)
    assert [(one.episode, one.start, one.chunk.token_ids.tolist()) for one in record.turns] == [
        (0, 0, [1, 2, 3]),
        (1, 0, [9]),
    ]
    assert [(one.episode, one.score.value) for one in record.scores] == [(2, 1.0)]
    assert [one.answer for one in record.calls] == [b"1"]


def test_a_group_that_asks_has_a_record_at_once_and_no_other_later() -> None:
    def work(pending: PendingWork) -> None:
        pending.add(turn(part(0, 1, 2)))
        pending.add(score(4, 2))
        pending.keep_now(3)
        pending.keep_now(5)

    first, later = kept_after(work)
    assert [one.chunk.token_ids.tolist() for one in first.turns] == [[1, 2]]
    assert (first.scores, later.turns) == ((), ())
    assert [one.group for one in later.scores] == [4]


def test_pieces_with_recorded_data_stay_apart() -> None:
    def work(pending: PendingWork) -> None:
        for start in (0, 2):
            pending.add(turn(part(start, 1)))
            pending.add(turn(part(start + 1, 2, sampling_mask=mask(start, 2))))
        pending.add(turn(part(4, 5)))

    (record,) = kept_after(work)
    assert [(one.start, one.end) for one in record.turns] == [(0, 2), (2, 4), (4, 5)]
    assert [one.chunk.sampling_mask is not None for one in record.turns] == [True, True, False]


def test_a_turn_that_began_again_leaves_nothing_of_what_was() -> None:
    def work(pending: PendingWork) -> None:
        pending.add(turn(part(0, 1, 2)))
        pending.add(turn(part(0, 7)))

    (record,) = kept_after(work)
    assert [one.chunk.token_ids.tolist() for one in record.turns] == [[7]]


def test_what_has_ended_is_in_no_record_of_work() -> None:
    def work(pending: PendingWork) -> None:
        pending.add(turn(part(0, 1)))
        pending.add(score(3, 0))
        pending.episode_ended(3, 0)
        pending.group_ended(3)
        pending.group_ended(4)

    assert kept_after(work) == []


def test_an_episode_that_ended_keeps_its_score() -> None:
    def work(pending: PendingWork) -> None:
        pending.add(turn(part(0, 1)))
        pending.add(score(3, 0))
        pending.episode_ended(3, 0)

    (record,) = kept_after(work)
    assert (len(record.turns), len(record.scores)) == (0, 1)


def test_nothing_is_recorded_before_its_time_or_after_the_end() -> None:
    assert kept_after(lambda pending: pending.add(turn(part(0, 1))), wait_s=1.0) == []
