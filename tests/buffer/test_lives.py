"""What may follow what in the life of a group, and where the tasks stand."""

import msgspec
import pytest

from penstock.buffer.life_records import (
    GroupDropped,
    GroupsSelected,
    GroupsTrained,
    LifeRecord,
    RunResumed,
    VersionIssued,
    WorkProgressed,
)
from penstock.buffer.lives import Lives
from tests.buffer.test_ledger import admitted, ended, finished
from tests.types.test_partial_work import part


def lived(*records: LifeRecord) -> Lives:
    lives = Lives()
    for record in records:
        lives.apply(record)
    return lives


def test_a_rollback_returns_later_groups_with_the_step_of_their_first_selection() -> None:
    trained = [GroupsTrained(step=step, numbers=(step - 1,)) for step in (1, 2, 3)]
    begun = [admitted(number) for number in range(3)]
    lives = lived(*begun, *map(finished, range(3)), *trained, RunResumed(step=1))
    assert [life.state for life in lives.by_number.values()] == ["trained", "scored", "scored"]
    assert [life.selected_at for life in lives.by_number.values()] == [0, 1, 2]
    assert lives.standing.step == 1
    lives.apply(GroupsTrained(step=2, numbers=(1, 2)))
    assert [life.selected_at for life in lives.by_number.values()] == [0, 1, 2]


def test_an_attempt_is_issued_runs_is_finished_and_scored() -> None:
    lives, states = lived(admitted(0)), []
    progressed = WorkProgressed(turns=(msgspec.structs.replace(part(0, 7), group=0),))
    for record in (progressed, ended(0, 1), ended(0, 1), ended(0, 0), finished(0)):
        states.append(lives.by_number[0].state)
        touched = lives.apply(record)
        assert list(touched) == ([0] if lives.by_number[0].state != states[-1] else [])
    assert [*states, lives.by_number[0].state] == [
        "issued",
        "running",
        "running",
        "running",
        "finished",
        "scored",
    ]


def test_a_group_whose_size_is_not_known_runs_until_it_is_scored() -> None:
    lives = lived(msgspec.structs.replace(admitted(0), size=0), ended(0, 0), ended(0, 1))
    assert lives.by_number[0].state == "running"


def test_a_group_that_was_selected_for_a_step_that_never_came_keeps_its_age_too() -> None:
    lives = lived(admitted(0), finished(0), GroupsSelected(step=4, numbers=(0,)), RunResumed(step=1))
    lives.apply(GroupsSelected(step=2, numbers=(0,)))
    assert (lives.by_number[0].state, lives.by_number[0].selected_at) == ("scored", 4)


def test_versions_of_a_history_that_was_given_up_count_from_the_step_that_is_shared() -> None:
    issued = [VersionIssued(version=step, step=step) for step in range(4)]
    assert lived(*issued, RunResumed(step=1)).standing.version_steps == (0, 1, 1, 1)


def test_versions_of_steps_whose_groups_came_back_keep_their_steps() -> None:
    """Steps 2 and 3 are made again, and so is step 2 after another crash."""
    issued = [VersionIssued(version=step, step=step) for step in range(6)]
    groups = [record for number in range(3) for record in (admitted(number), finished(number))]
    trained = [GroupsTrained(step=number + 1, numbers=(number,)) for number in range(3)]
    lives = lived(*issued, *groups, *trained)
    assert (lives.num_again(1), lives.num_again(3)) == (2, 0)
    lives.apply(RunResumed(step=1, num_again=2))
    assert lives.standing.version_steps == (0, 1, 2, 3, 3, 3)
    lives.apply(GroupsTrained(step=2, numbers=(1,)))
    assert lives.num_again(1) == 2
    lives.apply(RunResumed(step=1, num_again=2))
    assert lives.standing.version_steps == (0, 1, 2, 3, 3, 3)


def test_a_task_that_was_put_back_is_tried_again_once() -> None:
    lives = lived(admitted(0), finished(0), GroupDropped(number=0, reason="stale", returns="t0"))
    assert lives.standing.returned == ("t0",)
    again = admitted(1, num_taken=1)
    lives.apply(type(again)(ticket=again.ticket, task_id="t0", prompt="p", num_taken=1))
    assert (lives.standing.returned, lives.standing.num_taken) == ((), 1)
    lives.apply(GroupDropped(number=1, reason="score_error"))
    assert lives.standing.returned == ()


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([admitted(0), admitted(0)], "group 0 was admitted before, with task 't0'"),
        ([finished(0)], "group 0 was never admitted, or ended long ago"),
        ([admitted(0), finished(0), finished(0)], "group 0 is scored, so it can't become scored"),
        (
            [admitted(0), GroupDropped(number=0, reason="x"), GroupDropped(number=0, reason="x")],
            "group 0 is dropped, so it can't become dropped",
        ),
    ],
)
def test_what_cannot_follow_is_refused(records: list[LifeRecord], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lived(*records)
