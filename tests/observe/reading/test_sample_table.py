from pathlib import Path

import pytest

from penstock.observe.reading.sample_table import SampleTable
from tests.observe.examples import run_event, step
from tests.observe.store.written import read, sample, write


@pytest.fixture
def table(tmp_path: Path) -> SampleTable:
    events = [
        sample(0, step=1, reward=0.0, num_output_tokens=5, age=0),
        sample(0, step=1, reward=1.0, num_output_tokens=9, age=1, episode=2),
        step(1, 104.5),
        sample(1, step=2, reward=0.5, num_output_tokens=5, age=3, task_id="u", time=105.0),
        sample(2, step=None, drop="stale", reward=None, age=6, time=106.0),
        sample(3, step=None, drop="empty", reward=0.25, age=None, failure="timeout", time=107.0),
    ]
    write(tmp_path, [run_event(), *events])
    return read(tmp_path).samples


@pytest.mark.parametrize(
    ("choice", "rows"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"step": 1}, [0, 1]),
        ({"steps": (2, 9)}, [2]),
        ({"group": 0}, [0, 1]),
        ({"reward": (0.5, 1.0)}, [1, 2]),
        ({"tokens": (6, 9)}, [1, 3, 4]),
        ({"age": (3, 6)}, [2, 3]),
        ({"drop": "any"}, [3, 4]),
        ({"drop": "none"}, [0, 1, 2]),
        ({"drop": "empty"}, [4]),
        ({"drop": "unheard of"}, []),
        ({"task": "u"}, [2]),
        ({"task": "nobody's"}, []),
        ({"step": 1, "reward": (1, 1)}, [1]),
    ],
    ids=str,
)
def test_samples_are_found_by_what_they_are(table: SampleTable, choice, rows) -> None:
    assert table.select(**choice).tolist() == rows


def test_names_of_codes(table: SampleTable) -> None:
    assert [table.drop_names[code] for code in table.columns["drop"]] == ["", "", "", "stale", "empty"]
    assert [table.failure_names[code] for code in table.columns["failure"]][-1] == "timeout"
    assert table.columns["age"].tolist() == [0, 1, 3, 6, -1]


def test_a_bar_of_a_histogram_opens_its_samples(table: SampleTable) -> None:
    edges, counts = table.histogram("tokens")
    assert counts.sum() == 5
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        assert table.select(tokens=(low, high - 1)).size == count
    edges, counts = table.histogram("reward", bins=4)
    assert (edges.tolist(), counts.tolist()) == ([0, 0.25, 0.5, 0.75, 1], [1, 1, 1, 1])


def test_a_sample_is_read_with_its_texts(table: SampleTable) -> None:
    assert (table.read(1).answer, table.read(1).episode, table.head(1).answer) == ("84", 2, "")


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    write(tmp_path, [run_event()])
    table = read(tmp_path).samples
    assert (len(table), table.select().size, table.histogram("reward")[1].size) == (0, 0, 0)
