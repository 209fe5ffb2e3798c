"""Where a text ends that must not contain a stop string."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.serve.answer_forms import Piece, StopTexts, version_spans


def cut(text: str, stops: list[str], sizes: list[int]) -> list[str]:
    shown, found, at = StopTexts(stops), [], 0
    for size in sizes:
        found.append(shown.push(text[at : at + size]))
        at += size
    return [*found, shown.push(text[at:], is_last=True)]


@given(
    st.text("ab", max_size=12), st.lists(st.text("ab", max_size=3), max_size=2), st.lists(st.integers(0, 3))
)
def test_no_stop_string_is_shown_and_nothing_before_one_is_lost(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    shown = "".join(cut(text, stops, sizes))
    assert text.startswith(shown)
    assert all(not stop or stop not in shown for stop in stops)
    assert (shown == text) == all(not stop or stop not in text for stop in stops)


def test_what_may_become_a_stop_string_waits_until_it_is_known() -> None:
    assert cut("x--y", ["--z"], [1, 1, 1]) == ["x", "", "", "--y"]
    assert cut("x--z!", ["--z"], [1, 1, 1]) == ["x", "", "", ""]


def test_versions_are_spans_of_output_tokens() -> None:
    assert version_spans([3, 3, 5]) == [
        {"version": "3", "start": 0, "end": 2},
        {"version": "5", "start": 2, "end": 3},
    ]


def test_a_cancelled_answer_is_an_abort_for_clients() -> None:
    assert Piece(finish_reason="cancelled").reason == "abort"
