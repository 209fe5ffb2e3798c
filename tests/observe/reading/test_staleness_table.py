import msgspec
import pytest

from penstock.observe.reading.staleness_table import StalenessTable
from tests.observe.examples import STALENESS, drop


def table() -> StalenessTable:
    found = StalenessTable()
    found.add(STALENESS)
    found.add(msgspec.structs.replace(STALENESS, step=3, tokens=((1, 3, 4),), groups=((4, 1),)))
    return found


def test_tokens_are_counted_by_age_and_cause() -> None:
    bars = {bar.age: bar for bar in table().histogram()}
    assert {age: bar.tokens for age, bar in bars.items()} == {0: 0, 1: 10, 2: 6, 3: 0, 4: 4}
    assert (bars[1].generating, bars[1].waiting) == (0.0, 1.0)
    assert (bars[2].generating, bars[2].waiting) == pytest.approx(((5 + 2) / 6, 5 / 6))
    assert table().generating() == {0: 10, 1: 9, 2: 1}
    assert table().waiting() == {0: 1, 1: 15, 3: 4}
    assert [bar.tokens for bar in table().histogram(last_step=2)] == [0, 10, 6]


def test_another_bound_is_counted() -> None:
    stale = msgspec.structs.replace(drop("stale"), age=5)
    counts = table().what_if([stale, drop("empty")])
    assert [(one.bound, one.groups_too_old, one.tokens_too_old, one.drops_spared) for one in counts] == [
        (0, 4, 20, 0),
        (1, 2, 10, 0),
        (2, 1, 4, 0),
        (3, 1, 4, 0),
        (4, 0, 0, 0),
        (5, 0, 0, 1),
    ]


def test_an_undone_step_is_replaced() -> None:
    found = table()
    found.add(STALENESS)
    assert sum(bar.tokens for bar in found.histogram()) == 16
    assert StalenessTable().histogram() == StalenessTable().what_if() == []
