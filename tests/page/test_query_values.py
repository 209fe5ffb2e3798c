import math

import pytest

from penstock.page.query_values import Refused, chosen, optional_whole, span_of, whole


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("2..5", (2.0, 5.0)),
        ("..5", (-math.inf, 5.0)),
        ("2..", (2.0, math.inf)),
        ("-1.5..-0.5", (-1.5, -0.5)),
        ("7", (7.0, 7.0)),
        ("", None),
    ],
)
def test_a_span_has_two_ends(text: str, span: tuple[float, float] | None) -> None:
    assert span_of({"step": text}, "step") == span


def test_whole_numbers_have_bounds_and_a_default() -> None:
    assert (whole({}, "limit", 50), whole({"limit": "7"}, "limit", 50), optional_whole({}, "group")) == (
        50,
        7,
        None,
    )
    with pytest.raises(Refused, match="limit must be between 0 and 9, got 10"):
        whole({"limit": "10"}, "limit", 5, high=9)
    with pytest.raises(Refused, match="limit must be a whole number, got 'x'"):
        whole({"limit": "x"}, "limit", 5)


def test_a_word_is_one_of_a_few() -> None:
    assert (chosen({}, "x", ("a", "b")), chosen({"x": "b"}, "x", ("a", "b"))) == ("a", "b")
    with pytest.raises(Refused, match="x must be one of a, b, got 'c'"):
        chosen({"x": "c"}, "x", ("a", "b"))
