from penstock.loop.activity import Activity
from penstock.loop.attempt_records import GroupGenerated
from penstock.loop.attempts import Attempts
from tests.loop.test_attempts import admitted, finished


def test_groups_count_in_their_stage_and_the_oldest_is_named() -> None:
    times = iter([10.0, 30.0, 35.0, 36.0, 40.0])
    attempts = Attempts()
    attempts.apply(admitted(0))  # by an earlier process: it has not gone on yet
    attempts.follow(times.__next__)
    activity = Activity(attempts)
    assert activity.oldest_words(1.0) == "no group is under way"
    for record in (admitted(3), admitted(4), GroupGenerated(number=4), admitted(5)):
        attempts.apply(record)
    assert [one.ticket.number for one in activity.generating] == [3, 5]
    assert [one.ticket.number for one in activity.scoring] == [4]
    assert activity.oldest_words(72.0) == "the oldest is group 3 (task 't3'), in generation for 62 s"
    attempts.apply(finished(3))
    assert activity.oldest_words(72.0) == "the oldest is group 4 (task 't4'), in scoring for 37 s"
