import pytest

from penstock.observe.durations import duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (250, "4 min 10 s"),
        (3599, "59 min 59 s"),
        (7500, "2 h 5 min"),
        (86_400 * 3 + 4 * 3600 + 59, "3 d 4 h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, words: str) -> None:
    assert duration(seconds) == words
