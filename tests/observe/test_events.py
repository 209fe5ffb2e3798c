from typing import get_args

import msgspec
import pytest

from penstock.observe.events import AnyEvent, EventBatch, Span, shifted
from tests.observe.examples import ONE_OF_EACH


def test_there_is_an_example_of_every_kind() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(get_args(AnyEvent))


def test_every_event_survives_a_message() -> None:
    batch = EventBatch(now=1.0, events=ONE_OF_EACH, num_lost=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=EventBatch) == batch


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: type(event).__name__)
def test_a_shift_moves_all_times_of_an_event(event: AnyEvent) -> None:
    moved = shifted(event, 10.0)
    assert moved.time == event.time + 10
    if isinstance(event, Span) and isinstance(moved, Span):
        assert moved.start == event.start + 10
    assert shifted(moved, -10.0) == event
