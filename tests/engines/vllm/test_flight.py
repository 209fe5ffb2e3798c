import pytest

from penstock.engines.vllm.dialect import Event, Span
from penstock.engines.vllm.flight import Flight
from penstock.errors import PenstockError
from penstock.records import BlobRef, Chunk, Interrupt, RoutingRef, RoutingShape, joined_chunk
from tests.engines.contract import ask, joined


def tokens(*ids: int, reason: str | None = None, spans: tuple[Span, ...] = ()) -> Event:
    return Event(token_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason=reason, spans=spans)


def begun(version: int = 4, **options: int) -> Flight:
    flight = Flight(ask("a", max_tokens=20, **options))
    flight.begin(version)
    return flight


def versions(chunks: list[Chunk]) -> list[int]:
    return [int(version) for chunk in chunks for version in chunk.versions]


def test_tokens_are_passed_on_while_their_version_is_certain() -> None:
    flight = begun()
    flight.add(tokens(1, 2, 3))
    chunks = list(flight.ready())
    assert joined(chunks) == [1, 2, 3]
    assert versions(chunks) == [4, 4, 4]


def test_tokens_after_an_update_wait_for_the_end() -> None:
    flight = begun()
    flight.add(tokens(1))
    assert joined(list(flight.ready())) == [1]
    flight.is_certain = False
    flight.add(tokens(2, 3))
    assert list(flight.ready()) == []
    flight.add(tokens(4, reason="length", spans=(Span("4", 0, 2), Span("5", 2, 4))))
    chunks = list(flight.rest("length"))
    assert joined(chunks) == [2, 3, 4]
    assert versions(chunks) == [4, 5, 5]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]


@pytest.mark.parametrize(
    ("interrupt", "mixed"), [("inflight", [False, True, True]), ("inflight_recompute", [False] * 3)]
)
def test_tokens_behind_keys_that_an_update_left_are_mixed(interrupt: Interrupt, mixed: list[bool]) -> None:
    flight = begun()
    flight.add(tokens(1))
    flight.is_certain, flight.interrupt = False, interrupt
    flight.add(tokens(2, 3, reason="stop", spans=(Span("4", 0, 1), Span("5", 1, 3))))
    told = joined_chunk(list(flight.rest("stop"))).mixed
    assert told is not None
    assert told.tolist() == mixed


def test_an_update_before_the_first_token_may_find_the_prompt_half_computed() -> None:
    flight = begun()
    flight.is_certain, flight.interrupt = False, "inflight"
    flight.add(tokens(1, 2, reason="stop", spans=(Span("5", 0, 2),)))
    chunks = list(flight.rest("stop"))
    assert versions(chunks) == [5, 5]
    told = joined_chunk(chunks).mixed
    assert told is not None
    assert told.tolist() == [True, True]


def test_versions_that_were_wrong_are_an_error() -> None:
    flight = begun()
    flight.add(tokens(1))
    with pytest.raises(PenstockError, match="weights must only change while it is paused"):
        flight.add(tokens(2, reason="stop", spans=(Span("5", 0, 2),)))


def test_an_answer_with_an_adapter_keeps_its_version() -> None:
    flight = Flight(ask("a", max_tokens=20))
    flight.begin(7, keeps_version=True)
    flight.is_certain = False
    flight.add(tokens(1, reason="stop", spans=(Span("0", 0, 1),)))
    assert versions(list(flight.rest("stop"))) == [7]


def test_what_was_cut_off_is_carried_over_or_thrown_away() -> None:
    flight = begun(chunk_tokens=2)
    flight.add(tokens(1, 2, 3, reason="abort", spans=(Span("4", 0, 3),)))
    chunks, discarded = flight.carry_over("abort_resume")
    assert [len(chunk.token_ids) for chunk in chunks] == [2, 1]
    assert (flight.done, discarded) == ([1, 2, 3], 0)
    flight.begin(5)
    flight.add(tokens(4, reason="abort"))
    assert flight.carry_over("abort_retry") == ([], 4)
    flight.begin(6)
    flight.add(tokens(9, reason="length"))
    (chunk,) = flight.rest("length")
    assert chunk.restarts
    assert flight.done == []


def record(start: int, end: int) -> RoutingRef:
    shape = RoutingShape(family="Moe", num_layers=1, num_experts=4, top_k=1)
    blob = BlobRef(key="g/a.routes", num_bytes=end - start, checksum=0)
    return RoutingRef(start=start, num_tokens=end - start, shape=shape, blob=blob)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 8])
def test_the_experts_of_a_call_go_with_its_last_chunk(chunk_tokens: int) -> None:
    flight = begun(chunk_tokens=chunk_tokens, routing_start=1)
    assert flight.routed_until == 1
    flight.add(tokens(7, 8))
    chunks = list(flight.ready())
    flight.add(tokens(reason="abort", spans=(Span("4", 0, 2),)))
    assert (flight.num_before, flight.num_tokens) == (0, 5)
    flight.routing = record(1, 4)
    chunks += flight.carry_over("abort_resume")[0]
    assert joined(chunks) == [7, 8]
    assert [chunk.routing for chunk in chunks] == [*[None] * (len(chunks) - 1), record(1, 4)]
    flight.begin(5)
    assert (flight.routed_until, flight.num_before, flight.num_tokens) == (4, 2, 5)
    flight.add(tokens(9, 1, 2, reason="length", spans=(Span("5", 0, 3),)))
    flight.routing = record(4, 7)
    chunks = list(flight.rest("length"))
    assert joined(chunks) == [9, 1, 2]
    assert [chunk.routing for chunk in chunks] == [*[None] * (len(chunks) - 1), record(4, 7)]


def test_an_answer_that_begins_again_has_no_experts_yet() -> None:
    flight = begun(routing_start=1)
    flight.add(tokens(7, 8, reason="abort"))
    flight.routing = record(1, 4)
    flight.carry_over("abort_resume")
    flight.begin(5)
    flight.add(tokens(9, reason="abort"))
    flight.carry_over("abort_retry")
    assert (flight.routed_until, flight.routing) == (1, None)


def test_an_answer_that_closes_leaves_out_what_is_not_certain() -> None:
    flight = begun()
    flight.add(tokens(1))
    flight.is_certain = False
    flight.add(tokens(2))
    (chunk,) = flight.rest("cancelled")
    assert joined([chunk]) == [1]
