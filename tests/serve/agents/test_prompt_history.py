"""Prompts without messages, text and token ids, that go on after a turn, or rewrite what was said before."""

from collections.abc import Sequence

import msgspec
import pytest

from penstock.serve.agents.prompt_history import PromptHistory
from penstock.types import Turn
from tests.serve.agents.speakers import END, Characters, a_turn, text_of

LONG = "abcdefgh"


class Texts(Characters):
    """As real tokenizers, it shows no special tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return text_of(token_ids).replace("|", "")

    def encode_prompt(self, prompt: str) -> list[int]:
        return self.encode(prompt)


def history_of(*spoken: tuple[str, str]) -> tuple[PromptHistory, list[Turn]]:
    history, turns = PromptHistory(Texts()), []  # type: ignore[arg-type]
    for number, (prompt, said) in enumerate(spoken):
        turns.append(msgspec.structs.replace(a_turn(Texts().encode(prompt), said), id=f"g.0.{number}"))
        history.remember(turns[-1], prompt)
    return history, turns


@pytest.mark.parametrize(
    ("prompt", "expected", "is_rewritten"),
    [
        ("q|1", "q|1yes| more", False),  # the client's end is the one that was sampled
        ("q|1", "q|1", False),  # asked again
        ("q|1", "q|1no| more", True),  # other words than were said
        ("q|1", "something else", False),
    ],
)
def test_text_goes_on_after_a_turn_or_is_tokenised_whole(
    prompt: str, expected: str, is_rewritten: bool
) -> None:
    history, turns = history_of((prompt, "yes"))
    assert history.after_text(turns, expected) == (Texts().encode(expected), is_rewritten)


def test_the_tokens_that_were_sampled_are_kept_also_after_special_ones() -> None:
    history, turns = history_of(("u:q|a:", "yes"))
    odd = msgspec.structs.replace(turns[0], output_ids=turns[0].output_ids + 0)
    odd.output_ids[0] = 7  # as if "y" had been sampled as another token of the same text
    token_ids, is_rewritten = history.after_text([odd], "u:q|a:yes|u:more|a:")
    assert token_ids == [*odd.token_ids.tolist(), *Texts().encode("u:more|a:")]
    assert (token_ids.count(END), is_rewritten) == (3, False)


def test_the_longest_turn_is_gone_on_from() -> None:
    history, turns = history_of(("q", "a"), ("qa|r", "b"))
    token_ids, _ = history.after_text(turns, "qa|rb|s")
    assert token_ids == [*turns[1].token_ids.tolist(), ord("s")]


def test_an_answer_that_is_quoted_elsewhere_is_a_rewritten_history() -> None:
    history, turns = history_of(("q", LONG))
    assert history.after_text(turns, f"another beginning {LONG}|more")[1]
    assert not history.after_text(turns, f"another beginning {LONG[1:]}")[1]


@pytest.mark.parametrize(
    ("prompt", "is_rewritten"),
    [
        (f"q{LONG}|more", False),
        ("q", False),
        (f"q{LONG[:3]}X|more", True),
        (f"q{LONG}", True),  # its end is missing
        (f"other{LONG}|more", True),
        ("other", False),
        ("", False),
    ],
)
def test_token_ids_are_judged_alike(prompt: str, is_rewritten: bool) -> None:
    history, turns = history_of(("q", LONG))
    assert history.is_rewritten(turns, Texts().encode(prompt)) is is_rewritten


def test_bytes_of_two_ids_are_no_third_one() -> None:
    """Found between two numbers: 0x00000100 0x00000100 … has the bytes of 0x00010000 in it."""
    history = PromptHistory(Texts())  # type: ignore[arg-type]
    turn = a_turn([5], "")
    answer = msgspec.structs.replace(a_turn([5], "x" * 8, closed=False))
    answer.output_ids[:] = 0x10000
    prompt = [9] + [0x100] * 12
    assert not history.is_rewritten([turn, answer], prompt)
    assert history.is_rewritten([answer], [9] + [0x10000] * 8)


def test_nothing_said_yet_is_nothing_rewritten() -> None:
    history = PromptHistory(Texts())  # type: ignore[arg-type]
    assert not history.is_rewritten([], [1, 2])
    assert history.after_text([], "ab") == ([97, 98], False)
