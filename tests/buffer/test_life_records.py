"""What a commit of the journal keeps."""

from penstock.buffer.life_records import (
    EpisodeEnded,
    GroupDropped,
    LifeRecord,
    encode_commit,
    from_bytes,
)
from tests.buffer.test_admission import scored
from tests.buffer.test_ledger import admitted, finished


def ended(number: int) -> EpisodeEnded:
    return EpisodeEnded(number=number, episode=scored(number, [0]).group.episodes[0])


def test_episodes_of_a_group_that_ends_in_the_same_commit_are_not_written_twice() -> None:
    records: list[LifeRecord] = [
        *map(admitted, range(3)),
        *map(ended, range(3)),
        finished(0),
        GroupDropped(number=1, reason="score_error"),
    ]
    kept = encode_commit(records)
    assert [one for one, _ in kept] == [*records[:3], records[5], *records[6:]]
    assert [type(from_bytes(data)) for _, data in kept] == [type(one) for one, _ in kept]
