from penstock.observe.event_queue import EventQueue
from penstock.observe.events import Drop
from tests.observe.examples import drop


def test_a_queue_is_bounded_and_says_what_it_lost() -> None:
    queue = EventQueue(capacity=2)
    for number in range(5):
        queue.emit(drop("stale", group=number))
    batch = queue.take()
    assert [event.group for event in batch.events if isinstance(event, Drop)] == [0, 1]
    assert batch.num_lost == 3
    assert queue.take().events == ()
    assert queue.take().num_lost == 0
