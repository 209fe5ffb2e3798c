"""Calls of tools, as families of models write them."""

import json

import pytest

from penstock.serve.tool_calls import (
    GRANITE,
    MISTRAL,
    HermesCalls,
    ListCalls,
    LlamaCalls,
    ToolCall,
    parser_of,
)

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 3}}\n</tool_call>'


def test_json_between_tags_is_a_call_and_what_is_before_it_text() -> None:
    text, calls = HermesCalls().parse(f"I add.\n{CALL}\n{CALL}")
    assert text == "I add."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"x": 3})] * 2


def test_a_call_that_was_cut_off_by_its_end_tag_still_counts() -> None:
    assert HermesCalls().parse(CALL.removesuffix("</tool_call>"))[1] == [ToolCall("add", '{"x": 3}')]


def test_what_is_no_call_stays_text() -> None:
    for text in (
        "plain",
        "<tool_call>{broken",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>3",
        "<tool_call>" + "[" * 99_999,
    ):
        assert HermesCalls().parse(text) == (text, [])


def test_a_text_is_sent_up_to_where_a_call_may_begin() -> None:
    parser = HermesCalls()
    assert parser.begins("abc") == 3
    assert parser.begins("abc<tool") == 3
    assert parser.begins("abc<tool_call>{") == 3
    assert parser.begins("a < b") == 5


def test_llama_calls_with_an_answer_that_is_json() -> None:
    parser = LlamaCalls()
    assert parser.parse('{"name": "add", "parameters": {"x": 3}}') == ("", [ToolCall("add", '{"x": 3}')])
    assert parser.parse("hello") == ("hello", [])
    assert parser.begins('{"na') == 0
    assert parser.begins("hello") == 5


LIST = '[{"name": "add", "arguments": {"x": 3}}, {"name": "now", "arguments": {}}]'


@pytest.mark.parametrize("marker", [MISTRAL, GRANITE])
def test_a_list_of_calls_after_a_marker_or_alone(marker: str) -> None:
    parser, calls = ListCalls(marker), [ToolCall("add", '{"x": 3}'), ToolCall("now", "{}")]
    assert parser.parse(f"I add. {marker} {LIST}") == ("I add.", calls)
    assert parser.parse(f"{marker}{LIST}") == ("", calls)
    assert parser.parse(LIST) == ("", calls)  # the marker is a special token, and no text
    assert parser.begins("I add.") == 6
    assert parser.begins(f"I add.{marker[:4]}") == 6
    assert parser.begins(f"I add.{marker}[") == 6
    assert parser.begins('[{"na') == 0


@pytest.mark.parametrize(
    "text", ["hello", "[1, 2]", "[]", f"{MISTRAL}[{{", '[{"name": "add", "arguments": {}}, 3]', "[" * 99_999]
)
def test_a_list_of_something_else_stays_text(text: str) -> None:
    assert ListCalls(MISTRAL).parse(text) == (text, [])


def test_a_family_is_known_by_its_template() -> None:
    for marker in (MISTRAL, GRANITE):
        found = parser_of(f"… {marker} …")
        assert isinstance(found, ListCalls)
        assert found.parse(marker + LIST)[0] == ""
    assert isinstance(parser_of("… <tool_call> …"), HermesCalls)
    assert isinstance(parser_of('… "parameters" … ipython …'), LlamaCalls)
    assert parser_of("nothing of that kind") is None


def test_arguments_that_are_text_already_stay_as_they_are() -> None:
    found = HermesCalls().parse('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>')
    assert found == ("", [ToolCall("f", '{"x": 1}')])
