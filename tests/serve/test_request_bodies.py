"""Bodies of requests: what is taken, and what is refused by name."""

from typing import Any

import msgspec
import pytest

from penstock.serve.api_error import ApiError
from penstock.serve.request_bodies import ChatBody, CompletionBody, SamplingFields, TokenBody


def completion(**fields: Any) -> CompletionBody:
    return msgspec.convert({"prompt": "a"} | fields, CompletionBody)


def chat(**fields: Any) -> ChatBody:
    return msgspec.convert({"messages": [{"role": "user", "content": "a"}]} | fields, ChatBody)


def test_sampling_fields_become_our_settings() -> None:
    body = SamplingFields(
        max_tokens=5, temperature=0.5, top_k=-1, stop="x", stop_token_ids=[7], logit_bias={"3": 2.0}, seed=-1
    )
    sampling = body.sampling(end_ids=(0, 7), room=100)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (5, 0.5, 0)
    assert (sampling.stop, sampling.stop_token_ids, sampling.logit_bias) == (("x",), (7, 0), {3: 2.0})
    assert sampling.seed == 2**64 - 1


def test_defaults_are_ours_and_answers_may_fill_the_context() -> None:
    sampling = SamplingFields().sampling(end_ids=(0,), room=100)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (100, 1.0, 1.0)


def test_an_end_that_is_ignored_does_not_end() -> None:
    assert SamplingFields(ignore_eos=True).sampling(end_ids=(0,), room=9).stop_token_ids == ()


def test_a_setting_out_of_its_range_is_a_sentence() -> None:
    with pytest.raises(ApiError, match=r"^temperature must be 0, or >= 1e-06 and finite, got -1"):
        SamplingFields(temperature=-1).sampling(end_ids=(), room=9)
    with pytest.raises(ApiError, match=r"^temperature must be 0, or >= 1e-06 and finite, got 1e-300"):
        SamplingFields(temperature=1e-300).sampling(end_ids=(), room=9)
    with pytest.raises(ApiError, match=r"^stop must be texts that are not empty, got \('a', ''\)"):
        SamplingFields(stop=["a", ""]).sampling(end_ids=(), room=9)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"echo": True}, "echo is not supported"),
        ({"suffix": "b"}, "suffix is not supported"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"logprobs": 5}, "logprobs is not supported"),
    ],
)
def test_what_completions_lack_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said):
        completion(**fields).check()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top_logprobs": 3}, "top_logprobs is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"modalities": ["audio"]}, "modalities is not supported"),
        ({"tool_choice": "required"}, "tool_choice is not supported"),
        ({"messages": []}, "messages must not be empty"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize is not supported"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools is not supported"),
        ({"chat_template_kwargs": {"x": 1, "messages": []}}, "chat_template_kwargs.messages is not"),
    ],
)
def test_what_chat_lacks_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said):
        chat(**fields).check()


def test_what_changes_no_answer_is_taken() -> None:
    chat(
        user="me",
        chat_template_kwargs={"enable_thinking": False},
        metadata={"a": "b"},
        store=False,
        response_format={"type": "text"},
    ).check()
    completion(user="me", best_of=1, logprobs=1).check()


def test_a_field_that_is_not_known_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `bogus`"):
        completion(bogus=1)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_several(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [None], [True], [2**40], [[1], [-1]]])
def test_another_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="prompt must be a text"):
        completion(prompt=prompt).prompts()


def test_tools_are_shown_unless_the_client_says_none() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=tools).shown_tools == tools
    assert chat(tools=tools, tool_choice="none").shown_tools is None


def test_too_many_choices_are_refused() -> None:
    with pytest.raises(ApiError, match="n must be between 1 and 128, got 0"):
        completion(n=0).num_choices()


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [2**31]},
        {"token_ids": [-1]},
        {"chunk_tokens": 0},
        {"sampling_params": {"stop_token_ids": [2**40]}},
    ],
)
def test_ids_that_no_model_has_do_not_fit(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `int` [<>]"):
        msgspec.convert({"token_ids": [1]} | fields, TokenBody)


def test_requests_in_ids_refuse_several_answers_and_pictures() -> None:
    for fields in ({"sampling_params": {"n": 2}}, {"features": [1]}, {"sampling_params": {"logprobs": -1}}):
        with pytest.raises(ApiError, match="is not supported"):
            msgspec.convert({"token_ids": [1]} | fields, TokenBody).check()


def test_where_experts_would_begin_is_taken_since_no_answer_has_any() -> None:
    fields = {"token_ids": [1], "sampling_params": {"routed_experts_prompt_start": 7}}
    body = msgspec.convert(fields, TokenBody)
    body.check()
    plain = msgspec.convert({"token_ids": [1]}, TokenBody).sampling_params
    assert body.sampling_params.sampling(end_ids=(), room=9) == plain.sampling(end_ids=(), room=9)
