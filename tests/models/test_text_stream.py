"""Pieces of whole characters that add up to the decoded answer."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.models.text_stream import HALF, TextStream


class Bytes:
    """One token a byte; 0 is special."""

    stop_token_ids = (0,)

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token for token in token_ids if token).decode(errors="replace")


def pieces(tokens: list[int], size: int) -> list[str]:
    stream = TextStream(Bytes())  # type: ignore[arg-type]
    parts = [tokens[at : at + size] for at in range(0, len(tokens), size)] or [[]]
    return [stream.push(part, is_last=at == len(parts) - 1) for at, part in enumerate(parts)]


@given(st.text(st.characters(exclude_characters="\0" + HALF, exclude_categories=["Cs"])), st.integers(1, 5))
def test_pieces_add_up_and_hold_whole_characters(text: str, size: int) -> None:
    found = pieces([*text.encode(), 0], size)
    assert "".join(found) == text
    assert all(HALF not in piece for piece in found)


def test_a_character_comes_with_its_last_byte() -> None:
    assert pieces(list("aé".encode()), 1) == ["a", "", "é"]


def test_what_never_becomes_a_character_is_shown_at_the_end() -> None:
    assert pieces([ord("a"), 0xC3], 1) == ["a", HALF]
