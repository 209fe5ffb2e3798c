"""One contract over every reader, then what each of them makes of the events."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock.observe.event_stream import EventStream, Reader
from penstock.observe.readers import MemoryReader, MetricsReader, ViewReader, show
from penstock.observe.run_state import RunState
from penstock.observe.status import RunStatus
from penstock.observe.store.event_store import EventStore, budgets
from penstock.observe.views import SilentView
from penstock.observe.writers.metrics_jsonl import JsonlWriter
from tests.observe.examples import ONE_OF_EACH, SAMPLE, HandClock, counters, drop, phase, run_event, step

KEPT = budgets(samples_mb=1, tokens_mb=1, spans_mb=1)
MAKERS: dict[str, Callable[[RunState, Path], Reader]] = {
    "state": lambda state, folder: RunState(),
    "memory": lambda state, folder: MemoryReader(),
    "metrics": lambda state, folder: MetricsReader(state, JsonlWriter(folder / "metrics.jsonl")),
    "store": lambda state, folder: EventStore(folder, state, KEPT),
    "view": lambda state, folder: ViewReader(state, SilentView()),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_reader_takes_every_kind_of_event_and_emits_none(
    make: Callable[[RunState, Path], Reader], tmp_path: Path
) -> None:
    stream, seen, state = EventStream(HandClock()), MemoryReader(), RunState()
    stream.subscribe("state", state)
    stream.subscribe("reader", make(state, tmp_path))
    stream.subscribe("seen", seen)
    for event in ONE_OF_EACH:
        stream.emit(event)
    stream.close()
    assert seen.events == list(ONE_OF_EACH)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_reader_may_be_closed_before_any_event(
    make: Callable[[RunState, Path], Reader], tmp_path: Path
) -> None:
    make(RunState(), tmp_path).close()


def read(reader: Callable[[RunState], Reader], *events) -> None:
    state = RunState()
    each = (state, reader(state))
    for event in events:
        for one in each:
            one.on(event)
    each[1].close()


def test_metrics_have_a_row_a_step_and_one_an_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    read(lambda state: MetricsReader(state, JsonlWriter(path)), *ONE_OF_EACH)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row.get("reward"), row.get("heldout_reward")) for row in rows] == [
        (1, 0.5, None),
        (1, None, 0.75),
    ]
    assert rows[0]["dropped_stale"] == 1.0


def test_steps_that_are_trained_again_have_their_last_rows_alone(tmp_path: Path) -> None:
    events = [run_event(), *(step(number, 100.0 + number) for number in (1, 2, 3))]
    events += [step(number, 110.0 + number, reward=0.75) for number in (2, 3, 4)]
    read(lambda state: MetricsReader(state, JsonlWriter(tmp_path / "metrics.jsonl")), *events)
    kept, undone = (
        [(row["step"], row["reward"]) for row in map(json.loads, (tmp_path / name).read_text().splitlines())]
        for name in ("metrics.jsonl", "metrics.undone.jsonl")
    )
    assert kept == [(1, 0.5), (2, 0.75), (3, 0.75), (4, 0.75)]
    assert undone == [(2, 0.5), (3, 0.5)]


class Table(JsonlWriter):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tables: dict[int, list[int]] = {}

    def write_samples(self, step: int, rows) -> None:
        self.tables[step] = [row[1] for row in rows]


def test_a_tracker_gets_a_few_answers_now_and_then(tmp_path: Path) -> None:
    writer = Table(tmp_path / "metrics.jsonl")
    events = [run_event()]
    for number in range(1, 21):
        events += [
            msgspec.structs.replace(SAMPLE, step=number, group=100 * number + group, traced=group == 11)
            for group in range(12)
        ]
        events.append(step(number, 100.0 + number))
    read(lambda state: MetricsReader(state, writer), *events)
    assert writer.tables == {
        number: [100 * number + 11, *range(100 * number, 100 * number + 7)] for number in (1, 10, 20)
    }


def test_drops_after_the_last_step_have_a_row_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    read(
        lambda state: MetricsReader(state, JsonlWriter(path)),
        run_event(),
        drop("stale"),
        step(1, 104.0),
        drop("stale"),
        drop("empty"),
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["dropped_stale"] == 1.0
    assert rows[1:] == [{"step": 1, "dropped_empty": 1.0, "dropped_stale": 2.0}]


def test_a_run_is_shown_before_it_has_a_session_and_kept_from_then_on(tmp_path: Path) -> None:
    view, samples, clock, later = SilentView(), MemoryReader(), HandClock(7.0), list[Callable[[], None]]()
    shown = show(view)
    shown.events.log("reading tasks")
    assert view.lines == ["reading tasks"]
    shown.stream.move_to(clock, later.append)
    shown.keep([JsonlWriter(tmp_path / "metrics.jsonl")], samples)
    shown.events.log("loading")
    assert view.lines == ["reading tasks"]
    later.pop()()
    assert view.lines == ["reading tasks", "loading"]
    assert [(event.time, event.process) for event in samples.events] == [(7.0, "controller")]
    shown.stream.emit(step(1, 104.0))
    shown.stream.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward"] == 0.5
    assert shown.state.step == 1


def test_a_view_that_fails_at_the_start_costs_nothing() -> None:
    class Closed(SilentView):
        def log(self, line: str) -> None:
            raise BrokenPipeError

        def update(self, status: RunStatus) -> None:
            raise BrokenPipeError

    shown = show(Closed())
    shown.stream.emit(run_event())
    shown.events.log("a line")
    shown.stream.close()
    assert shown.state.name == "demo"


class Drawing(SilentView):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[RunStatus] = []

    def update(self, status: RunStatus) -> None:
        self.drawn.append(status)


def test_the_view_is_drawn_now_and_then_and_says_the_first_loss_of_a_kind() -> None:
    view = Drawing()
    read(
        lambda state: ViewReader(state, view),
        run_event(100.0),
        phase("training", 100.1),
        *(counters("engine0", 100.1 + tick / 10, tokens=float(tick)) for tick in range(21)),
        drop("stale"),
        drop("stale"),
        drop("empty"),
        msgspec.structs.replace(SAMPLE, time=103.0),
        msgspec.structs.replace(SAMPLE, failure="timeout", message="too slow", time=103.0),
        msgspec.structs.replace(SAMPLE, failure="timeout", message="again", time=103.0),
    )
    assert [round(status.elapsed_s, 1) for status in view.drawn] == [0.0, 0.1, 0.6, 1.1, 1.6, 2.1, 3.0]
    assert view.lines == [
        f"dropped a group ({reason}): why; further ones are counted, not printed"
        for reason in ("stale", "empty")
    ] + ["an episode of task 't' failed (timeout): too slow; further ones are counted, not printed"]
