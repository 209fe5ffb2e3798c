import time
from pathlib import Path

from benchmarks.observe_cost import Recorded, SeeingTime, replay, trace_speed
from penstock.observe.event_queue import MonotonicClock
from penstock.observe.event_stream import EventStream
from penstock.observe.events import AnyEvent
from penstock.observe.reading.run_reading import RunReading
from tests.observe.examples import ONE_OF_EACH


def test_events_are_made_emitted_and_written_again(tmp_path: Path) -> None:
    recorded = Recorded()
    for event in ONE_OF_EACH * 20:
        recorded.on(event)
    assert 0 < replay(recorded.events, tmp_path / "replay") < 5
    run = RunReading(tmp_path / "replay")
    run.refresh()
    assert len(run.samples) == 20
    assert len(run.drops) == 20


def test_a_trace_counts_its_spans(tmp_path: Path) -> None:
    found = trace_speed(tmp_path, 50)
    assert found["num_spans"] == 50 * 14
    assert found["num_arrows"] == 50 * 13
    assert found["spans_per_s"] > 0


def test_time_inside_the_readers_of_a_stream_is_counted_while_the_context_is_open() -> None:
    told: list[float] = []

    class Slow(Recorded):
        def on(self, event: AnyEvent) -> None:
            begin = time.thread_time()
            while time.thread_time() - begin < 0.02:
                pass
            told.append(time.thread_time() - begin)

    stream = EventStream(MonotonicClock())
    stream.subscribe("slow", Slow())
    with SeeingTime() as seeing:
        stream.emit(ONE_OF_EACH[0])
    assert sum(told) <= seeing.cpu_s < sum(told) + 0.02
    counted = seeing.cpu_s
    stream.emit(ONE_OF_EACH[0])
    assert (len(told), seeing.cpu_s) == (2, counted)
