import io

from penstock.observe.trace.trace_file import TraceFile, nanoseconds
from tests.observe.trace.wire import descriptors, events, number


def test_tracks_slices_and_arrows() -> None:
    file = io.BytesIO()
    trace = TraceFile(file)
    process = trace.process("engine0")
    slot, counter = trace.track(process, "slot 0"), trace.counter_track(process, "running")
    trace.begin(slot, 1.5, "generate", {"request": "g1.0.0", "tokens": -3, "s": 0.5}, flows=[7, 8], ends=[9])
    trace.end(slot, 2.0)
    trace.count(counter, 2.0, 3.5)
    trace.flush()
    described = descriptors(file.getvalue())
    assert [one[1] for one in described] == [[process], [slot], [counter]]
    assert described[1][2] == [b"slot 0"] and described[1][5] == [process]
    assert described[2][8] == [b""]
    begin, end, count = events(file.getvalue())
    assert (begin[0], begin[1][9], begin[1][11], begin[1][23]) == (1_500_000_000, [1], [slot], [b"generate"])
    assert [number(flow) for flow in begin[1][47]] == [7, 8]
    assert [number(flow) for flow in begin[1][48]] == [9]
    assert len(begin[1][4]) == 3
    assert (end[0], end[1][9], end[1][11]) == (2_000_000_000, [2], [slot])
    assert count[1][9] == [4]
    assert (trace.num_slices, trace.num_flows) == (1, 2)


def test_times_are_whole_and_never_negative() -> None:
    assert (nanoseconds(-1.0), nanoseconds(0.5)) == (0, 500_000_000)
