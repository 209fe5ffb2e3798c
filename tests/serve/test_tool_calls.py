"""Calls of tools, as families of models write them."""

import json

from penstock.serve.tool_calls import HermesCalls, LlamaCalls, ToolCall, parser_of

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


def test_a_family_is_known_by_its_template() -> None:
    assert isinstance(parser_of("… <tool_call> …"), HermesCalls)
    assert isinstance(parser_of('… "parameters" … ipython …'), LlamaCalls)
    assert parser_of("nothing of that kind") is None


def test_arguments_that_are_text_already_stay_as_they_are() -> None:
    found = HermesCalls().parse('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>')
    assert found == ("", [ToolCall("f", '{"x": 1}')])
