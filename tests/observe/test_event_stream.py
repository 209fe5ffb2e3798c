import time
from collections.abc import Callable

import pytest

from penstock.observe.event_queue import EventQueue
from penstock.observe.event_stream import EventStream
from penstock.observe.events import AnyEvent, Counters, Drop, LogLine, Span
from penstock.observe.readers import MemoryReader
from penstock.observe.recorder import EventSink, Recorder
from tests.observe.examples import ONE_OF_EACH, SAMPLE, HandClock, counters, drop, run_event


class Failing(MemoryReader):
    """A disk that is full from the second event on."""

    def on(self, event: AnyEvent) -> None:
        super().on(event)
        if len(self.events) > 1:
            raise OSError("no space left")


def test_readers_get_every_event_in_order() -> None:
    stream, first, second = EventStream(HandClock()), MemoryReader(), MemoryReader()
    stream.subscribe("first", first)
    stream.subscribe("second", second)
    for event in ONE_OF_EACH:
        stream.emit(event)
    stream.close()
    assert first.events == second.events == list(ONE_OF_EACH)
    assert first.closed and second.closed


def test_a_reader_that_fails_is_reported_once_and_detached() -> None:
    stream, failing, other = EventStream(HandClock(5.0)), Failing(), MemoryReader()
    stream.subscribe("metrics.jsonl", failing)
    stream.subscribe("view", other)
    for event in ONE_OF_EACH:
        stream.emit(event)
    assert len(failing.events) == 2 and failing.closed
    assert [event for event in other.events if event in ONE_OF_EACH] == list(ONE_OF_EACH)
    lines = [event.line for event in other.events if isinstance(event, LogLine)]
    assert lines[0] == (
        "metrics.jsonl failed and gets no more of this run (OSError: no space left); the run continues"
    )
    assert len(lines) == 2  # the other is one of the examples


def test_the_last_reader_may_fail_too() -> None:
    stream = EventStream(HandClock())
    stream.subscribe("view", Failing())
    for event in ONE_OF_EACH:
        stream.emit(event)
    stream.close()


def test_a_reader_that_fails_to_close_keeps_nobody_from_closing() -> None:
    class Stuck(MemoryReader):
        def close(self) -> None:
            raise OSError("gone")

    stream, other = EventStream(HandClock()), MemoryReader()
    stream.subscribe("wandb", Stuck())
    stream.subscribe("view", other)
    stream.close()
    assert other.closed
    assert [event.line for event in other.events if isinstance(event, LogLine)] == [
        "wandb failed and gets no more of this run (OSError: gone); the run continues"
    ]


def test_readers_are_told_later_and_what_they_emit_comes_after() -> None:
    later: list[Callable[[], None]] = []
    stream, reader = EventStream(HandClock(), defer=later.append), MemoryReader()

    class Echo(MemoryReader):
        def on(self, event: AnyEvent) -> None:
            if not isinstance(event, LogLine):
                stream.of("echo").log("heard")

    stream.subscribe("echo", Echo())
    stream.subscribe("reader", reader)
    stream.emit(run_event())
    stream.emit(drop("stale"))
    assert (reader.events, len(later)) == ([], 1)
    later.pop()()
    assert [type(event).__name__ for event in reader.events] == ["RunEvent", "Drop", "LogLine", "LogLine"]
    assert not later
    stream.emit(run_event())
    assert len(later) == 1


def test_a_full_line_leaves_out_spans_and_samples_but_never_a_drop() -> None:
    stream, reader = EventStream(HandClock(), defer=lambda flush: None, capacity=2), MemoryReader()
    stream.subscribe("reader", reader)
    for event in (run_event(), drop("stale"), SAMPLE, counters("engine0", 1.0, tokens=1.0), drop("empty")):
        stream.emit(event)
    assert stream.num_lost == 2
    stream.close()
    assert reader.events[-1] == LogLine(
        process="controller", time=0.0, line="2 events came faster than they were read, and were left out"
    )
    assert [event.reason for event in reader.events if isinstance(event, Drop)] == ["stale", "empty"]


def test_a_recorder_gives_name_and_clock_to_what_it_emits() -> None:
    clock, reader = HandClock(3.0), MemoryReader()
    stream = EventStream(clock)
    stream.subscribe("reader", reader)
    recorder = stream.of("trainer")

    def fail() -> None:
        with recorder.measure("step", "forward", step=4):
            clock.now = 5.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert reader.events == [
        Span(process="trainer", time=5.0, track="step", name="forward", start=3.0, attributes={"step": 4})
    ]


def _sinks() -> list[EventSink]:
    stream = EventStream(HandClock(), defer=lambda flush: None, capacity=10**6)
    stream.subscribe("reader", MemoryReader())
    return [stream, EventQueue(capacity=10**6)]


@pytest.mark.parametrize("sink", _sinks(), ids=["stream", "queue"])
def test_an_event_costs_a_few_microseconds_of_who_emits_it(sink: EventSink) -> None:
    recorder = Recorder(sink, "a", HandClock())
    count, took_s = 500, []
    for _ in range(
        10
    ):  # the quickest of ten: others share this machine, and the garbage collector this process
        started = time.process_time()
        for number in range(count):
            recorder.span("slot 3", "generate", 1.0, group=number)
        took_s.append((time.process_time() - started) / count)
    assert min(took_s) < 20e-6  # 1 to 2 on an idle machine


def test_a_reader_is_told_only_of_the_kinds_that_it_names() -> None:
    stream = EventStream(HandClock())
    steps, every = MemoryReader(), MemoryReader()
    stream.subscribe("steps", steps, only=(Drop, LogLine))
    stream.subscribe("every", every)
    recorder = stream.of("controller")
    recorder.count(tokens=1)
    recorder.log("a line")
    assert [type(event) for event in steps.events] == [LogLine]
    assert [type(event) for event in every.events] == [Counters, LogLine]
    late = MemoryReader()
    stream.subscribe("late", late)
    recorder.count(tokens=2)
    assert len(late.events) == 1
