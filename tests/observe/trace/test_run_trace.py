from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_run import write_made_run
from penstock.observe.events import Span
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.trace.run_trace import nested, write_trace
from tests.observe.examples import run_event, step, update
from tests.observe.store.written import read, write
from tests.observe.trace.wire import descriptors, events, number


def span(
    start: float, end: float, process: str = "p", track: str = "t", name: str = "n", **attributes
) -> Span:
    return Span(process=process, time=end, track=track, name=name, start=start, attributes=attributes)


def written(run: RunReading) -> bytes:
    report = write_trace(run)
    assert report.path == run.folder / "trace.pftrace"
    data = report.path.read_bytes()
    assert len(data) == report.num_bytes
    return data


def test_arrows_go_from_a_rollout_to_its_step_and_on_to_the_update(tmp_path: Path) -> None:
    import msgspec

    trained = msgspec.structs.replace(step(1, 104.0), groups=(5,))
    write(
        tmp_path,
        [
            run_event(),
            span(100.0, 101.0, "engine0", "slot 0", "generate", request="g5.0.0"),
            span(100.0, 102.0, "engine0", "slot 1", "generate", request="g5.1.0"),
            span(100.0, 102.0, "engine0", "slot 2", "generate", request="g6.0.0"),
            span(103.0, 104.0, "trainer", "step", "step", step=1),
            trained,
            msgspec.structs.replace(update(3, 0.25, time=105.0), step=1),
            span(104.5, 105.0, "engine0", "update", "update", version=3),
        ],
    )
    found = list(events(written(read(tmp_path))))
    leaving = {number(flow): one[23][0] for _, one in found for flow in one.get(47, ())}
    arriving = {number(flow): one[23][0] for _, one in found for flow in one.get(48, ())}
    assert leaving.keys() == arriving.keys()
    pairs = Counter((leaving[flow], arriving[flow]) for flow in leaving)
    assert pairs == {(b"generate", b"step 1"): 2, (b"step 1", b"update"): 1}


def test_a_run_without_engine_spans_has_arrows_from_its_groups(tmp_path: Path) -> None:
    import msgspec

    write(
        tmp_path,
        [
            run_event(),
            span(100.0, 101.0, "controller", "slot 0", "generate", group=5),
            span(103.0, 104.0, "trainer", "step", "step", step=1),
            msgspec.structs.replace(step(1, 104.0), groups=(5,)),
        ],
    )
    assert sum(len(one.get(47, ())) for _, one in events(written(read(tmp_path)))) == 1


def test_every_slice_that_begins_ends_on_its_track(tmp_path: Path) -> None:
    run = RunReading(write_made_run(tmp_path / "made", steps=50))
    run.refresh()
    data = written(run)
    open_on: Counter[int] = Counter()
    last: dict[int, int] = {}
    for time, one in events(data):
        (track,), (kind,) = one[11], one[9]
        assert time >= last.get(track, 0)
        last[track] = time
        open_on[track] += {1: 1, 2: -1, 4: 0}[kind]
        assert open_on[track] >= 0
    assert set(open_on.values()) == {0}
    names = [one[2][0] for one in descriptors(data) if 2 in one]
    assert names.index(b"slot 2") < names.index(b"slot 3")
    assert b"running" in names and b"reward" in names


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=12))
def test_slices_nest_whatever_the_spans(pairs: list[tuple[float, float]]) -> None:
    spans = [span(min(pair), max(pair)) for pair in pairs]
    ends, time = [], 0.0
    for at, place in nested(range(len(spans)), spans):
        assert at >= time
        time = at
        if place is None:
            ends.pop()
        else:
            ends.append(place)
    assert ends == []


def test_an_old_trace_stays_when_a_new_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [run_event(), span(100.0, 101.0)])
    run = read(tmp_path)
    before = written(run)
    monkeypatch.setattr(run.steps, "column", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_trace(run)
    assert (tmp_path / "trace.pftrace").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
