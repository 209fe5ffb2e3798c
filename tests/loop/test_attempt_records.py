"""What a commit of the journal keeps."""

from penstock.loop.attempt_records import (
    AttemptRecord,
    EpisodeEnded,
    GroupDropped,
    GroupGenerated,
    encode_commit,
    from_bytes,
    groups_of,
)
from tests.loop.test_attempts import admitted, finished
from tests.records.builders import scored


def ended(number: int) -> EpisodeEnded:
    return EpisodeEnded(number=number, episode=scored(number, [0]).group.episodes[0])


def test_what_a_group_did_that_ends_in_the_same_commit_is_not_written_twice() -> None:
    records: list[AttemptRecord] = [
        *map(admitted, range(3)),
        *map(ended, range(3)),
        GroupGenerated(number=0),
        GroupGenerated(number=2),
        finished(0),
        GroupDropped(number=1, reason="score_error"),
    ]
    kept = [from_bytes(data) for data in encode_commit(records)]
    assert [type(one) for one in kept] == [
        type(one) for one in [*records[:3], records[5], records[7], *records[8:]]
    ]
    assert [list(groups_of(one)) for one in kept] == [[0], [1], [2], [2], [2], [0], [1]]
