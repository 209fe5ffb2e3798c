from pathlib import Path

import msgspec

from penstock.observe.reading.run_reading import RunReading
from penstock.page.findings import best, odd, show_findings, widest_trace, worst
from tests.observe.examples import TEXTS, TOKENS, column, counters, phase, run_event, step
from tests.observe.store.written import read, sample, write


def run(folder: Path, *samples) -> RunReading:
    write(folder, [run_event(), *samples, step(2, 105.0)])
    return read(folder)


def test_best_and_worst_have_one_answer_a_group(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        *(sample(group, reward=group / 10, episode=episode) for group in range(6) for episode in range(2)),
        sample(9, reward=None, drop="stale", step=None),
    )
    assert [found.samples.head(one.row).group for one in best(found)] == [5, 4, 3]
    assert [found.samples.head(one.row).group for one in worst(found)] == [0, 1, 2]
    assert best(found)[0].why == "reward 0.5"


def test_odd_ones_say_what_is_odd(tmp_path: Path) -> None:
    same = "the answer is always forty-two"
    found = run(
        tmp_path,
        sample(0, num_output_tokens=900, reward=0.0),
        sample(1, num_output_tokens=1, reward=1.0),
        sample(2, age=7, reward=0.5),
        sample(3, advantage=-2.5, reward=0.5),
        *(sample(10 + number, answer=same, task_id=str(number), reward=0.5) for number in range(4)),
    )
    assert {found.samples.head(one.row).group: one.why for one in odd(found)} == {
        0: "the longest answer: 900 tokens",
        1: "the shortest answer with the highest reward",
        2: "the oldest tokens: 7 steps behind",
        3: "most unlike the rest of its group: advantage ±2.50",
        10: "the same answer to 4 tasks",
    }


def test_nothing_is_odd_where_nothing_is(tmp_path: Path) -> None:
    write(tmp_path, [run_event()])
    found = read(tmp_path)
    assert best(found) == worst(found) == odd(found) == []


def test_the_widest_gap_is_found(tmp_path: Path) -> None:
    wide = msgspec.structs.replace(TOKENS, group=5, gaps=column("<f4", 4.0, 0.0))
    rows = [sample(3, traced=True), sample(5, traced=True)]
    write(tmp_path, [run_event(), TEXTS, TOKENS, wide, *rows, step(2, 105.0)])
    found = read(tmp_path)
    trace = widest_trace(found)
    assert trace is not None and trace.group == 5
    widest = show_findings(found)["widest"]
    assert (widest["group"], widest["gap"], widest["row"]) == (5, 4.0, 1)


def test_findings_say_how_far_the_run_came_and_what_to_look_at(tmp_path: Path) -> None:
    engine = [counters("engine0", time, tokens=tokens) for time, tokens in ((100.5, 40.0), (103.0, 1040.0))]
    events = [
        run_event(),
        engine[0],
        phase("training", 100.5),
        engine[1],
        sample(1, reward=0.5),
        step(2, 104.0),
    ]
    write(tmp_path, events)
    found = show_findings(read(tmp_path))
    assert found["lead"].startswith("2 of 9 steps in ") and "stopped while training" in found["lead"]
    assert ("steps", "2") in found["facts"] and ("reward, last 8 steps", "0.500") in found["facts"]
    assert ("tokens while training", "1,000") in found["facts"]
    assert found["warnings"][0]["what"] == "the run did not end by itself"
    assert found["answers"][0] == ("Best", [{"row": 0, "why": "reward 0.5"}])
    assert found["widest"] is None
