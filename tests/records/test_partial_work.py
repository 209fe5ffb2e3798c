from penstock.records import (
    CallAnswer,
    Chunk,
    Episode,
    PartialGroup,
    TurnPart,
    WorkProgressed,
    blobs_of,
)
from tests.records.test_answers import chunk, mask


def part(
    start: int, *tokens: int, episode: int = 0, turn: int = 0, key: bytes = b"k", **options: object
) -> TurnPart:
    made: Chunk = chunk(*tokens, **options)
    return TurnPart(group=3, episode=episode, turn=turn, key=key, start=start, chunk=made)


def known(*parts: TurnPart) -> list[list[int]]:
    group = PartialGroup()
    for one in parts:
        group.add_part(one)
    return [one.chunk.token_ids.tolist() for one in group.turns.get((0, 0), [])]


def test_parts_follow_each_other() -> None:
    assert known(part(0, 1, 2), part(2, 3)) == [[1, 2], [3]]


def test_a_turn_that_began_again_is_what_came_since() -> None:
    assert known(part(0, 1, 2), part(0, 4)) == [[4]]
    assert known(part(0, 1, 2), part(0, 4, key=b"other")) == [[4]]


def test_what_an_earlier_life_knew_beyond_a_part_is_void() -> None:
    assert known(part(0, 1, 2), part(2, 3), part(2, 7)) == [[1, 2], [7]]


def test_a_part_that_follows_nothing_is_left_out() -> None:
    assert known(part(2, 3)) == []
    assert known(part(0, 1), part(2, 3)) == [[1]]
    assert known(part(0, 1), part(1, 3, key=b"other")) == [[1]]


def test_an_episode_that_ended_takes_its_turns_and_calls_with_it() -> None:
    group = PartialGroup()
    group.add_part(part(0, 1, 2, episode=0))
    group.add_part(part(0, 1, 2, 3, episode=1))
    for episode in (0, 1):
        answer = CallAnswer(group=3, episode=episode, call=0, key=b"k", answer=b"1")
        group.add(3, WorkProgressed(calls=(answer,)))
    group.end_episode(Episode(task_id="t", turns=(), index=0))
    assert list(group.turns) == list(group.calls) == [(1, 0)]
    assert (group.num_tokens, list(group.episodes)) == (3, [0])


def test_a_turn_is_cut_where_a_blob_is_lost() -> None:
    group = PartialGroup()
    lost = part(2, 3, sampling_mask=mask(2, 1))
    for one in (part(0, 1, 2), lost, part(3, 4)):
        group.add_part(one)
    assert [ref.key for ref in blobs_of([lost])] == ["s/n"]
    group.cut(lost)
    assert group.num_tokens == 2
    group.cut(group.turns[(0, 0)][0])
    assert group.turns == {}
