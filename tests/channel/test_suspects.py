"""The search for who ended a process, without processes."""

from penstock.channel.suspects import Attempt, Suspects


def attempts(*names: tuple[int, int]) -> list[Attempt]:
    """Of these groups and indices."""
    return [Attempt(group, index, "task 't'") for group, index in names]


def halves(suspects: Suspects[Attempt]) -> list[list[tuple[int, int]]]:
    return [[(one.group, one.index) for one in half.members] for half in suspects.halves]


def test_the_cut_is_between_tasks_while_there_are_several() -> None:
    suspects = Suspects[Attempt]()
    had = attempts((2, 0), (1, 0), (2, 1), (1, 1), (2, 2))
    assert suspects.died(had, None, "killed") is None
    assert halves(suspects) == [[(1, 0), (1, 1)], [(2, 0), (2, 1), (2, 2)]]


def test_a_half_that_dies_clears_the_other_unless_that_runs_already() -> None:
    for is_running, left in ((False, []), (True, [[(2, 0)]])):
        suspects = Suspects[Attempt]()
        suspects.died(attempts((1, 0), (1, 1), (2, 0)), None, "killed")
        one, other = suspects.halves
        other.is_running = is_running
        suspects.died(list(one.members), one, "killed")
        assert halves(suspects) == [[(1, 0)], [(1, 1)], *left]


def test_a_death_that_does_not_happen_again_is_nobodys() -> None:
    suspects = Suspects[Attempt]()
    had = attempts((1, 0), (2, 0))
    suspects.died(had, None, "killed")
    for attempt in had:
        suspects.judge(attempt)
        assert not attempt.failure
        suspects.clear(attempt)
    assert suspects.halves == []


def test_a_call_that_was_alone_when_its_process_died_is_tried_once_more() -> None:
    suspects, (lone,) = Suspects[Attempt](), attempts((1, 0))
    assert suspects.died([lone], None, "killed") is None
    assert (halves(suspects), lone.failure) == ([[(1, 0)]], "")
    deed = "task 't' ended its process twice, the last time alone in it: segfault"
    assert suspects.died([lone], suspects.halves[0], "segfault") == deed
    assert (halves(suspects), lone.failure) == ([], deed)


def test_calls_of_a_culprits_task_leave_the_halves_of_others_and_run_together() -> None:
    suspects, (lone, waits, mixed, innocent) = Suspects[Attempt](), attempts((1, 0), (1, 1), (1, 2), (2, 0))
    suspects.died([lone], None, "killed")
    suspects.died([lone], lone.half, "killed")
    suspects.died([mixed, innocent, *(others := attempts((3, 0)))], None, "killed")
    assert halves(suspects) == [[(1, 2)], [(2, 0), (3, 0)]]
    suspects.died([mixed, *others], None, "killed")
    for attempt in (waits, mixed, innocent, *others):
        suspects.judge(attempt)
    assert waits.half is mixed.half is not None
    assert halves(suspects) == [[(1, 2), (1, 1)], [(3, 0)], [(2, 0)]]


def test_two_culprits_stand_for_their_task_and_are_told_of_once() -> None:
    suspects, had = Suspects[Attempt](), attempts((1, 0), (1, 1), (1, 2))
    suspects.died(had, None, "killed")
    assert suspects.died(had[:1], had[0].half, "killed") is not None
    assert suspects.died(had[1:2], None, "killed") is None
    suspects.judge(had[2])
    assert had[2].failure == (
        "2 calls of task 't' have ended their process, so that this one was not tried again"
    )
