from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.plain_text import (
    encodable,
    fair_share,
    plain_block,
    plain_line,
    without_middle,
    without_middles,
)


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert (
        plain_line("a\x1b[2Jb\r\nc\x07\x9b31m\u202e\ud800 – é")
        == "a\\x1b[2Jb c\\x07\\x9b31m\\u202e\\ud800 – é"
    )
    assert plain_block("one\n\ttwo\x1b]0;title\x07") == "one\n\ttwo\\x1b]0;title\\x07"


def test_there_is_an_end_to_it() -> None:
    line = plain_line("x" * 3_000_000)
    assert len(line) < 2100
    assert line.endswith("x … (3000000 characters in all)")
    assert plain_line("x" * 2000) == "x" * 2000
    block = plain_block("y" * 30_000 + "end")
    assert block.startswith("… (the last 20000 of 30003 characters)\nyyy")
    assert block.endswith("end")


def test_what_a_stream_can_not_show_becomes_a_question_mark() -> None:
    assert encodable("reward – 1", "ascii") == "reward ? 1"
    assert encodable("reward – 1", "utf-8") == encodable("reward – 1", None) == "reward – 1"


def test_long_texts_lose_their_middle() -> None:
    assert without_middle("a" * 2000, 2000) == "a" * 2000
    assert without_middle("a" * 3000 + "b" * 500, 2000) == "a" * 1500 + " […] " + "b" * 500


def test_of_several_texts_the_longest_lose_their_middles() -> None:
    assert without_middles(["a" * 5, "b" * 50, "c" * 90], 85) == [
        "a" * 5,
        "b" * 30 + " […] " + "b" * 10,
        "c" * 30 + " […] " + "c" * 10,
    ]
    assert without_middles(["a" * 5, "b" * 6], 11) == ["a" * 5, "b" * 6]
    assert without_middles([], 11) == []


@given(st.lists(st.integers(0, 99)), st.integers(0, 999))
def test_what_is_cut_to_a_fair_share_fits_and_wastes_nothing(sizes: list[int], room: int) -> None:
    share = fair_share(sizes, room)
    cut = [min(size, share) for size in sizes]
    assert sum(cut) <= room
    assert cut == sizes or sum(min(size, share + 1) for size in sizes) > room
