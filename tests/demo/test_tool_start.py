"""The built-in model that can call a calculator: its tokenizer, its teacher, and that it can be taught."""

import dataclasses
import random
from pathlib import Path

import pytest

from penstock.demo.model import ToolRecipe, ensure_builtin_model
from penstock.demo.tool_start import IGNORED, VOCABULARY, conversation, make_tool_tokenizer
from penstock.models.tokenizer import ChatTokenizer
from penstock.serve.tool_calls import parser_of

TINY = ToolRecipe(hidden_size=16, num_layers=1, num_heads=2, mlp_size=16, max_steps=2, batch=4)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 214, "b": 387}}</tool_call>'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_builtin_model(tmp_path_factory.mktemp("cache"), recipe=TINY)


def test_its_tokenizer_takes_a_call_apart_into_few_tokens_and_back(made: Path) -> None:
    tokenizer = ChatTokenizer(str(made))
    token_ids = tokenizer.encode(CALL)
    assert len(token_ids) == 9
    assert tokenizer.decode(token_ids) == CALL
    parser = parser_of(tokenizer.template)
    assert parser is not None
    text, (call,) = parser.parse(tokenizer.decode(token_ids))
    assert (text, call.name, call.arguments) == ("", "add", '{"a": 214, "b": 387}')


def test_the_template_writes_what_the_teacher_writes(made: Path) -> None:
    """Without mistakes, the conversation of the lesson is the template's."""
    recipe = dataclasses.replace(TINY, call_share=1.0, wrong_digit_share=0.0)
    token_ids, targets = conversation(recipe, random.Random(0))
    text = "".join(VOCABULARY[token] for token in token_ids)
    question, _, rest = text.removeprefix("<|user|>").partition("<|end|><|assistant|>")
    a, b = question.rstrip("=").split("+")
    call = {"function": {"name": "add", "arguments": {"a": int(a), "b": int(b)}}}
    result = str(int(a) + int(b))
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
    ]
    tokenizer = ChatTokenizer(str(made))
    rendered = tokenizer.render_chat(messages)
    assert text == rendered + result + "<|end|>"
    assert tokenizer.encode(text) == token_ids
    learnt = "".join(VOCABULARY[token] for token in targets if token != IGNORED)
    assert learnt == rest.partition("<|tool|>")[0] + result + "<|end|>"


def test_the_teacher_guesses_calls_and_errs_as_often_as_the_recipe_says() -> None:
    recipe, rng = ToolRecipe(), random.Random(1)
    rows = [conversation(recipe, rng)[0] for _ in range(2000)]
    calls = [row for row in rows if VOCABULARY.index("<|tool|>") in row]
    assert len(calls) / len(rows) == pytest.approx(0.3, abs=0.04)
    assert {len(row) for row in rows if row not in calls} == {15}


def test_it_is_saved_with_its_template_and_its_end(made: Path) -> None:
    tokenizer = make_tool_tokenizer(TINY)
    assert tokenizer.eos_token == "<|end|>"
    assert ChatTokenizer(str(made)).has_template
    assert ChatTokenizer(str(made)).stop_token_ids == (VOCABULARY.index("<|end|>"),)
