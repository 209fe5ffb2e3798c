"""Calls as token ids: what was sampled stays as it was, and what was rewritten is found out."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from penstock.records import Turn
from penstock.serve.agents.conversation import Conversation, Heard, PromptHistory, canonical
from tests.serve.agents.speakers import END, Characters, a_turn, assistant, forgetful, plain, text_of, user

OPENING = [{"role": "system", "content": "be kind"}, user("hello")]


def say(conversation: Conversation, heard: Heard, said: str, **message: Any) -> None:
    """The turn that a call came to, with the message that its client is sent."""
    closed = message.pop("closed", True)
    answer = {**assistant(said), **message}
    conversation.speak(heard, a_turn(heard.token_ids, said, closed=closed), answer)


def test_a_second_call_goes_on_after_the_very_tokens_of_the_first() -> None:
    conversation = Conversation(Characters())
    first = conversation.hear(OPENING)
    assert (first.kind, text_of(first.token_ids)) == ("first", "s:be kind|u:hello|a:")
    say(conversation, first, "  hi  ")
    second = conversation.hear([*OPENING, assistant("hi"), user("more")])
    # The template would have trimmed the answer; what was sampled is kept.
    assert (second.kind, text_of(second.token_ids)) == ("continued", "s:be kind|u:hello|a:  hi  |u:more|a:")


def test_an_answer_that_was_cut_off_is_closed_by_the_template() -> None:
    conversation = Conversation(Characters())
    first = conversation.hear(OPENING)
    say(conversation, first, "hi th", closed=False)
    second = conversation.hear([*OPENING, assistant("hi th"), user("go on")])
    assert text_of(second.token_ids) == "s:be kind|u:hello|a:hi th|u:go on|a:"


def test_calls_of_tools_come_back_as_they_were_sampled_and_their_results_after_them() -> None:
    """Two calls at once; the client spells their JSON differently, has ids of its own, and answers both."""
    conversation = Conversation(Characters())
    tools = [{"type": "function", "function": {"name": "add"}}]
    sampled = '<tool_call>{"name":"add","arguments":{"x": 1}}</tool_call><tool_call>{"name":"add","arguments":{}}</tool_call>'
    first = conversation.hear(OPENING, tools)
    calls = [
        {"id": "c0", "function": {"name": "add", "arguments": '{"x": 1}'}},
        {"id": "c1", "function": {"name": "add", "arguments": "{}"}},
    ]
    conversation.speak(
        first,
        a_turn(first.token_ids, sampled),
        {"role": "assistant", "content": None, "tool_calls": calls},
    )
    sent = [
        {"id": "other0", "function": {"name": "add", "arguments": {"x": 1}}},
        {"id": "other1", "function": {"name": "add", "arguments": {}}},
    ]
    results = [
        {"role": "tool", "content": "1", "tool_call_id": "other0"},
        {"role": "tool", "content": "0", "tool_call_id": "other1"},
    ]
    second = conversation.hear(
        [*OPENING, {"role": "assistant", "content": "", "tool_calls": sent}, *results], tools
    )
    assert second.kind == "continued"
    assert text_of(second.token_ids) == f"[add]s:be kind|u:hello|a:{sampled}|t:1|t:0|a:"


def test_the_same_call_again_forks_with_the_same_tokens() -> None:
    conversation = Conversation(Characters())
    first = conversation.hear(OPENING)
    say(conversation, first, " hi")
    second = conversation.hear([*OPENING, assistant("hi"), user("more")])
    say(conversation, second, "one")
    again = conversation.hear([*OPENING, assistant("hi"), user("more")])
    assert (again.kind, again.token_ids) == ("forked", second.token_ids)
    other_way = conversation.hear([*OPENING, assistant("hi"), user("other")])
    assert (other_way.kind, text_of(other_way.token_ids)) == ("forked", "s:be kind|u:hello|a: hi|u:other|a:")


@pytest.mark.parametrize(
    "rewritten",
    [
        [OPENING[0], user("hello"), assistant("hi, edited"), user("more")],
        [{"role": "system", "content": "be brief"}, user("hello"), assistant("hi"), user("more")],
        [user("hello"), user("(summary: hi) more")],
    ],
)
def test_a_client_that_rewrites_history_is_found_out(rewritten: list[dict[str, Any]]) -> None:
    conversation = Conversation(Characters())
    say(conversation, conversation.hear(OPENING), "hi")
    heard = conversation.hear(rewritten)
    assert (heard.kind, text_of(heard.token_ids)) == ("client", plain(rewritten))


def test_a_rewritten_answer_in_the_middle_keeps_the_tokens_before_it() -> None:
    conversation = Conversation(Characters())
    say(conversation, conversation.hear(OPENING), " hi")
    second = conversation.hear([*OPENING, assistant("hi"), user("more")])
    say(conversation, second, "lots")
    heard = conversation.hear([*OPENING, assistant("hi"), user("more"), assistant("cut"), user("and?")])
    assert (heard.kind, text_of(heard.token_ids)) == (
        "client",
        "s:be kind|u:hello|a: hi|u:more|a:cut|u:and?|a:",
    )


def test_an_answer_of_somebody_else_is_context() -> None:
    """A judge, another policy: the client puts its words between the turns."""
    conversation = Conversation(Characters())
    say(conversation, conversation.hear(OPENING), " hi")
    heard = conversation.hear([*OPENING, assistant("hi"), user("a"), assistant("of another"), user("b")])
    assert (heard.kind, text_of(heard.token_ids)) == (
        "continued",
        "s:be kind|u:hello|a: hi|u:a|a:of another|u:b|a:",
    )


def test_a_template_that_drops_reasoning_is_found_out_where_it_does() -> None:
    conversation = Conversation(Characters(forgetful))
    say(conversation, conversation.hear(OPENING), "<t>hm</t>call")
    result = {"role": "tool", "content": "4"}
    looping = conversation.hear([*OPENING, assistant("<t>hm</t>call"), result])
    assert (looping.kind, text_of(looping.token_ids)) == (
        "continued",
        "s:be kind|u:hello|a:<t>hm</t>call|t:4|a:",
    )
    say(conversation, looping, "four")
    asked = [*OPENING, assistant("<t>hm</t>call"), result, assistant("four"), user("sure?")]
    heard = conversation.hear(asked)
    assert (heard.kind, text_of(heard.token_ids)) == (
        "template",
        "s:be kind|u:hello|a:call|t:4|a:four|u:sure?|a:",
    )


def test_a_template_that_drops_the_reasoning_of_the_last_answer_is_found_out() -> None:
    """All before that answer is written as it was; the answer itself is not."""
    conversation = Conversation(Characters(forgetful))
    say(conversation, conversation.hear(OPENING), "<t>hm</t>hi")
    heard = conversation.hear([*OPENING, assistant("<t>hm</t>hi"), user("more")])
    assert (heard.kind, text_of(heard.token_ids)) == ("template", "s:be kind|u:hello|a:hi|u:more|a:")


def test_another_conversation_is_no_rewrite() -> None:
    conversation = Conversation(Characters())
    say(conversation, conversation.hear(OPENING), "hi")
    assert conversation.hear([user("summarise this")]).kind == "separate"


def test_other_tools_make_another_conversation() -> None:
    conversation = Conversation(Characters())
    say(conversation, conversation.hear(OPENING), "hi")
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert conversation.hear([*OPENING, assistant("hi"), user("more")], tools).kind == "client"


def test_messages_are_equal_that_say_the_same() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    sent = {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "1"}]}
    back = {
        "role": "assistant",
        "content": " ",
        "tool_calls": [{"function": {"name": "f", "arguments": {"b": 2, "a": 1}}}],
        "refusal": None,
    }
    assert canonical(sent) == canonical(back)
    assert canonical(sent) != canonical({**back, "content": "x"})


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
