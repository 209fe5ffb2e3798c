"""What may follow what in the life of a group, and where the tasks stand."""

import msgspec
import pytest

from penstock.loop.admission import Ticket
from penstock.loop.attempt_records import (
    AttemptRecord,
    EpisodeEnded,
    GroupAdmitted,
    GroupDropped,
    GroupGenerated,
    GroupResumed,
    GroupScored,
    GroupsSelected,
    GroupsTrained,
    RunResumed,
    VersionIssued,
    scored_record,
)
from penstock.loop.attempts import Attempts
from penstock.records import Episode, WorkProgressed
from tests.records.builders import scored
from tests.records.test_partial_work import part


def admitted(number: int, num_taken: int | None = None) -> GroupAdmitted:
    return GroupAdmitted(
        ticket=Ticket(number=number, bound=2, deadline=2),
        task_id=f"t{number}",
        prompt="p",
        num_taken=number + 1 if num_taken is None else num_taken,
    )


def ended(number: int, index: int) -> EpisodeEnded:
    return EpisodeEnded(number=number, episode=Episode(task_id=f"t{number}", turns=(), index=index))


def finished(number: int) -> GroupScored:
    return scored_record(number, scored(number, [0]), None)


def lived(*records: AttemptRecord) -> Attempts:
    attempts = Attempts()
    for record in records:
        attempts.apply(record)
    return attempts


def test_a_rollback_returns_later_groups_with_the_step_of_their_first_selection() -> None:
    trained = [GroupsTrained(step=step, numbers=(step - 1,)) for step in (1, 2, 3)]
    begun = [admitted(number) for number in range(3)]
    attempts = lived(*begun, *map(finished, range(3)), *trained, RunResumed(step=1))
    assert [one.state for one in attempts.by_number.values()] == ["trained", "scored", "scored"]
    assert [one.selected_at for one in attempts.by_number.values()] == [0, 1, 2]
    assert attempts.standing.step == 1
    attempts.apply(GroupsTrained(step=2, numbers=(1, 2)))
    assert [one.selected_at for one in attempts.by_number.values()] == [0, 1, 2]


def test_an_attempt_is_issued_runs_is_generated_and_scored() -> None:
    attempts, states = lived(admitted(0)), []
    progressed = WorkProgressed(turns=(msgspec.structs.replace(part(0, 7), group=0),))
    for record in (progressed, ended(0, 1), ended(0, 0), GroupGenerated(number=0), finished(0)):
        states.append(attempts.by_number[0].state)
        attempts.apply(record)
    assert [*states, attempts.by_number[0].state] == [
        "issued",
        "running",
        "running",
        "running",
        "generated",
        "scored",
    ]
    assert (attempts.num_left, attempts.under_way) == (2, {})


def test_an_attempt_goes_on_after_a_restart_with_what_it_has() -> None:
    attempts = Attempts(keeps_content=True)
    for record in (admitted(0), ended(0, 1), GroupGenerated(number=0), GroupResumed(number=0)):
        attempts.apply(record)
    one = attempts.by_number[0]
    assert one.partial is not None
    assert (one.state, list(one.partial.episodes), attempts.standing.num_taken) == ("issued", [1], 1)


def test_what_is_followed_has_times_and_what_was_before_has_none() -> None:
    now = iter(range(9))
    attempts = lived(admitted(0), admitted(1), GroupsTrained(step=3, numbers=()))
    attempts.follow(lambda: float(next(now)))
    for record in (GroupResumed(number=1), GroupGenerated(number=1), finished(1), finished(0)):
        attempts.apply(record)
    before, one = attempts.by_number.values()
    assert (before.began_s, before.generated_s, before.scored_s) == (None, None, 3)
    assert (one.began_s, one.generated_s, one.generated_at, one.scored_s) == (0, 1, 3, 2)


def test_the_versions_of_each_policy_are_counted_apart() -> None:
    issued = [VersionIssued(policy=policy, version=0, step=step) for step, policy in enumerate("aba")]
    assert lived(*issued).standing.version_steps == {"a": (0, 2), "b": (1,)}


def test_a_group_that_was_selected_for_a_step_that_never_came_keeps_its_age_too() -> None:
    attempts = lived(admitted(0), finished(0), GroupsSelected(step=4, numbers=(0,)), RunResumed(step=1))
    attempts.apply(GroupsSelected(step=2, numbers=(0,)))
    assert (attempts.by_number[0].state, attempts.by_number[0].selected_at) == ("scored", 4)


def test_versions_of_a_history_that_was_given_up_count_from_the_step_that_is_shared() -> None:
    issued = [VersionIssued(version=step, step=step) for step in range(4)]
    assert lived(*issued, RunResumed(step=1)).standing.version_steps == {"policy": (0, 1, 1, 1)}


def test_versions_of_steps_whose_groups_came_back_keep_their_steps() -> None:
    """Steps 2 and 3 are made again, and so is step 2 after another crash."""
    issued = [VersionIssued(version=step, step=step) for step in range(6)]
    groups = [record for number in range(3) for record in (admitted(number), finished(number))]
    trained = [GroupsTrained(step=number + 1, numbers=(number,)) for number in range(3)]
    attempts = lived(*issued, *groups, *trained)
    assert (attempts.num_again(1), attempts.num_again(3)) == (2, 0)
    attempts.apply(RunResumed(step=1, num_again=2))
    assert attempts.standing.version_steps == {"policy": (0, 1, 2, 3, 3, 3)}
    attempts.apply(GroupsTrained(step=2, numbers=(1,)))
    assert attempts.num_again(1) == 2
    attempts.apply(RunResumed(step=1, num_again=2))
    assert attempts.standing.version_steps == {"policy": (0, 1, 2, 3, 3, 3)}


def test_a_task_that_was_put_back_is_tried_again_once() -> None:
    attempts = lived(admitted(0), finished(0), GroupDropped(number=0, reason="stale", returns="t0"))
    assert attempts.standing.returned == ("t0",)
    again = admitted(1, num_taken=1)
    attempts.apply(type(again)(ticket=again.ticket, task_id="t0", prompt="p", num_taken=1))
    assert (attempts.standing.returned, attempts.standing.num_taken) == ((), 1)
    attempts.apply(GroupDropped(number=1, reason="score_error"))
    assert attempts.standing.returned == ()


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([admitted(0), admitted(0)], "group 0 was admitted before, with task 't0'"),
        ([admitted(0), finished(0), GroupResumed(number=0)], "group 0 is scored, so it can't be resumed"),
        ([finished(0)], "group 0 was never admitted, or ended long ago"),
        ([admitted(0), finished(0), finished(0)], "group 0 is scored, so it can't become scored"),
        (
            [admitted(0), GroupDropped(number=0, reason="x"), GroupDropped(number=0, reason="x")],
            "group 0 is dropped, so it can't become dropped",
        ),
    ],
)
def test_what_cannot_follow_is_refused(records: list[AttemptRecord], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lived(*records)
