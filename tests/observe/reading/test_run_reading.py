import fcntl
from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.observe.events import Span
from penstock.observe.reading.frame_index import FrameIndex
from penstock.observe.reading.run_reading import LOCK, RunReading
from penstock.observe.run_state import RunState
from penstock.observe.store.event_store import EventStore
from penstock.run import run_folder
from penstock.run.summary import summarise
from tests.observe.examples import ONE_OF_EACH, counters, drop, phase, run_event, step
from tests.observe.store.written import KEPT, read, sample, write


def test_the_state_is_the_one_of_the_run_itself(tmp_path: Path) -> None:
    events = [
        run_event(100.0),
        phase("training", 101.0),
        counters("engine0", 101.0, tokens=0.0, busy_s=0.0, running=3.0, waiting=1.0),
        *(
            event
            for number in range(1, 8)
            for event in (
                counters("engine0", 101.0 + number, tokens=50.0 * number, busy_s=0.5 * number),
                sample(number, step=number, time=101.25 + number),
                step(number, 101.5 + number, reward=number / 10),
            )
        ),
        drop("stale", 109.0),
        phase("evaluating", 110.0),
    ]
    write(tmp_path, events)
    live = RunState()
    for event in events:
        live.on(event)
    found = read(tmp_path).state
    assert found.status().tokens_per_s == pytest.approx(50.0)
    for name in (
        "step",
        "reward",
        "rewards",
        "left_s",
        "elapsed_s",
        "drops",
        "processes",
        "staleness_mean",
        "samples",
    ):
        assert getattr(found.status(), name) == getattr(live.status(), name), name
    assert found.row == pytest.approx(live.row)
    assert found.time_sheet.processes() == live.time_sheet.processes()


def test_tokens_of_training_are_those_of_the_summary_and_the_others_are_evaluations(tmp_path: Path) -> None:
    events = [
        run_event(100.0),
        counters("engine0", 105.0, tokens=300.0),
        phase("training", 105.0),
        counters("engine0", 107.0, tokens=1300.0),
        step(1, 107.0),
        phase("evaluating", 107.0),
        counters("engine0", 109.0, tokens=1500.0),
    ]
    write(tmp_path, events)
    run = read(tmp_path)
    assert (run.cost().tokens, run.cost().tokens_training) == (1500.0, 1000.0)
    assert summarise(run.state).tokens == 1000


def test_a_run_is_followed_while_it_goes_on(tmp_path: Path) -> None:
    state = RunState()
    store = EventStore(tmp_path, state, KEPT)
    run = RunReading(tmp_path)
    assert not run.refresh()
    for number in range(1, 4):
        for event in (sample(number, step=number), step(number, 100.0 + number)):
            state.on(event)
            store.on(event)
        assert run.refresh()
        assert (run.state.step, len(run.samples), run.revision) == (number, number, number)
        assert not run.refresh()
    store.close()


def test_samples_of_undone_steps_are_marked(tmp_path: Path) -> None:
    events = [run_event()]
    for time, number in enumerate((1, 2, 3, 2, 3), start=101):
        events += [sample(10 * time + number, step=number, time=time), step(number, float(time))]
    write(tmp_path, events)
    run = read(tmp_path)
    assert run.samples.columns["undone"].tolist() == [False, True, True, False, False]
    assert run.samples.select().tolist() == [0, 3, 4]
    assert run.samples.select(undone=True).size == 5
    assert run.steps.numbers.tolist() == [1, 2, 3]


def test_spans_of_a_stretch_of_time(tmp_path: Path) -> None:
    spans = [
        Span(process="p", time=101.0 + number, track="t", name="n", start=100.5 + number)
        for number in range(9)
    ]
    write(tmp_path, [run_event(), *spans])
    run = read(tmp_path)
    assert [span.start for span in run.spans(2.0, 4.0)] == [1.5, 2.5, 3.5]
    assert len(run.spans(process="q")) == 0
    assert len(run.spans(limit=3)) == 3


def test_only_frames_of_that_time_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [
        Span(process="p", time=101.0 + number, track="t", name="x", start=100.0 + number)
        for number in range(300)
    ]
    write(tmp_path, [run_event(), *spans])
    run, read_places = read(tmp_path), []
    whole = FrameIndex.read
    monkeypatch.setattr(
        FrameIndex, "read", lambda index, place: read_places.append(place) or whole(index, place)
    )
    assert [span.start for span in run.spans(50.2, 51.8)] == [50.0, 51.0]
    assert len(read_places) <= 4
    assert len(run.spans(limit=None)) == 300
    assert len(read_places) > 200


def test_tokens_of_an_answer_are_found(tmp_path: Path) -> None:
    write(tmp_path, [*ONE_OF_EACH, sample(3, traced=True, step=2, time=106.0)])
    run = read(tmp_path)
    (trace,) = run.tokens(2, 3, 1)
    assert trace.texts == ["a", "b", "<script>", "a"]
    assert run.tokens(2, 3, 0) == run.tokens(9, 3, 1) == []
    assert run.traced == [(2, 3, 1)]


def test_whether_a_run_goes_on(tmp_path: Path) -> None:
    assert LOCK == run_folder.LOCK
    write(tmp_path, [run_event()])
    run = read(tmp_path)
    assert not run.is_running
    with run_folder.held(tmp_path):
        assert run.is_running
    assert not run.is_running
    with (tmp_path / LOCK).open("a") as file:  # whoever looks keeps no controller from starting
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no events"):
        RunReading(tmp_path)
