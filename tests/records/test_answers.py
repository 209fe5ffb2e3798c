import msgspec
import numpy as np
import pytest

from penstock.records import (
    AnswerSoFar,
    BlobRef,
    Chunk,
    GenerateRequest,
    MaskRef,
    RoutingRef,
    RoutingShape,
    SamplingParams,
    joined_chunk,
)
from tests.records.builders import make_chunk

BLOB = BlobRef(key="s/n", num_bytes=1, checksum=0)
SHAPE = RoutingShape(family="x", num_layers=1, num_experts=4, top_k=1)


def request(**options: object) -> GenerateRequest:
    base = GenerateRequest(
        id="g0.0.0", token_ids=np.array([1, 2], np.int32), sampling=SamplingParams(max_tokens=9)
    )
    return msgspec.structs.replace(base, **options)


def chunk(*tokens: int, **options: object) -> Chunk:
    return make_chunk(tokens, logprobs=-0.5, **options)


def mask(start: int, count: int) -> MaskRef:
    return MaskRef(start=start, num_tokens=count, vocab_size=8, blob=BLOB)


def answer_of(asked: GenerateRequest, *chunks: Chunk, records_routing: bool = False) -> AnswerSoFar:
    answer = AnswerSoFar(asked, records_routing=records_routing)
    for one in chunks:
        answer.add(one)
    return answer


def test_another_engine_is_asked_for_what_is_left() -> None:
    handed_on = answer_of(request(), chunk(5), chunk(6, 7)).hand_on(resumes=True)
    assert handed_on.request.token_ids.tolist() == [1, 2, 5, 6, 7]
    assert handed_on.request.num_resumed == 3
    assert (list(handed_on.again), handed_on.is_void) == ([], False)


def test_what_a_request_went_on_after_counts_too() -> None:
    asked = request(token_ids=np.array([1, 2, 5], np.int32), num_resumed=1)
    handed_on = answer_of(asked, chunk(6)).hand_on(resumes=True)
    assert handed_on.request.token_ids.tolist() == [1, 2, 5, 6]
    assert handed_on.request.num_resumed == 2


def test_an_answer_of_one_version_begins_again() -> None:
    asked = request(token_ids=np.array([1, 2, 5], np.int32), num_resumed=1)
    handed_on = answer_of(asked).hand_on(resumes=False)
    assert handed_on.request.token_ids.tolist() == [1, 2]
    assert handed_on.request.num_resumed == 0
    assert handed_on.is_void


def test_chunks_after_the_last_recorded_mask_are_lost_and_the_others_sent_again() -> None:
    first, second, third = chunk(5), chunk(6, sampling_mask=mask(0, 2)), chunk(7)
    handed_on = answer_of(request(record_sampling_mask=True), first, second, third).hand_on(resumes=True)
    assert handed_on.request.token_ids.tolist() == [1, 2, 5, 6]
    assert [one.token_ids.tolist() for one in handed_on.again] == [[5], [6]]
    assert [one.restarts for one in handed_on.again] == [True, False]


def test_routes_are_asked_for_from_where_they_end() -> None:
    routes = RoutingRef(start=0, num_tokens=3, shape=SHAPE, blob=BLOB)
    asked = request(record_routing=True)
    answer = answer_of(asked, chunk(5, 6, routing=routes), records_routing=True)
    resumed = answer.hand_on(resumes=True).request
    assert (resumed.routing_start, resumed.routing) == (3, (routes,))
    assert answer_of(asked, chunk(5, 6), records_routing=True).hand_on(resumes=True).is_void


def test_an_answer_that_begins_again_asks_again_for_the_routes_that_are_void() -> None:
    """Those of its prompt came with its first chunks, which no longer count. An earlier turn's are still known."""
    earlier, own = (
        RoutingRef(start=start, num_tokens=count, shape=SHAPE, blob=BLOB) for start, count in ((0, 1), (1, 2))
    )
    asked = request(record_routing=True, routing_start=1, routing=(earlier,))
    resumed = answer_of(asked, chunk(5, 6, routing=own), records_routing=True).hand_on(resumes=True).request
    assert (resumed.routing_start, resumed.routing) == (3, (earlier, own))
    later = answer_of(resumed, chunk(7), records_routing=True)
    handed_on = later.hand_on(resumes=True)
    assert handed_on.is_void
    assert handed_on.request.token_ids.tolist() == [1, 2]
    assert (handed_on.request.routing_start, handed_on.request.routing) == (1, (earlier,))
    later.add(chunk(8, restarts=True, routing=own))
    again = later.hand_on(resumes=True).request
    assert (again.routing_start, again.routing) == (3, (earlier, own))


def test_an_answer_that_began_again_is_what_came_since() -> None:
    answer = answer_of(request(), chunk(5, 6), chunk(8, restarts=True))
    assert answer.hand_on(resumes=True).request.token_ids.tolist() == [1, 2, 8]


def test_chunks_join() -> None:
    both = joined_chunk([chunk(5), chunk(6, 7, finish_reason="stop")])
    assert (both.token_ids.tolist(), both.finish_reason) == ([5, 6, 7], "stop")
    assert both.mixed is None
    told = chunk(5, mixed=np.array([True]))
    assert joined_chunk([told, chunk(6)]).mixed is None
    told = joined_chunk([told, chunk(6, mixed=np.array([False])), chunk(finish_reason="stop")])
    assert told.mixed is not None
    assert told.mixed.tolist() == [True, False]


def test_more_output_than_there_may_be_is_refused() -> None:
    with pytest.raises(ValueError, match="num_resumed must be in 0..8"):
        request(num_resumed=9)


def test_an_answer_of_which_only_the_end_was_missing_is_ended() -> None:
    full = answer_of(request(), chunk(*range(10, 19)))
    assert [one.finish_reason for one in full.hand_on(resumes=True).again] == ["length"]
    stopping = request(sampling=SamplingParams(max_tokens=9, stop_token_ids=(7,)))
    stopped = answer_of(stopping, chunk(5, 7), chunk())
    (end,) = stopped.hand_on(resumes=True).again
    assert (end.finish_reason, end.token_ids.tolist()) == ("stop", [])
    assert answer_of(stopping, chunk(7, 5)).ending(()) is None
