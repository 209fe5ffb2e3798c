import json
from typing import Any

import numpy as np
import pytest

from penstock.engines.vllm.dialect import Ask, Event, Span, parse_event, versions_of
from penstock.errors import EngineLost, PenstockError
from tests.engines.contract import ask


def line(**choice: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n".encode()


def test_a_request_names_all_of_its_sampling() -> None:
    request = ask(
        "a", prompt=[5, 6], max_tokens=8, temperature=0.5, top_k=3, stop_token_ids=(0,), seed=2**63 + 1
    )
    body = Ask(request=request, max_context=64, salt="policy:1").body()
    assert body["token_ids"] == [5, 6]
    assert (body["cache_salt"], body["stream"]) == ("policy:1", True)
    assert "model" not in body
    sampling = body["sampling_params"]
    assert {name: sampling[name] for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p")} == {
        "max_tokens": 8,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    assert (sampling["stop_token_ids"], sampling["ignore_eos"], sampling["logprobs"]) == ([0], True, 0)
    assert sampling["seed"] == 1


def test_the_rest_of_a_request_follows_what_is_there() -> None:
    request = ask("a", prompt=[5, 6], max_tokens=8, min_tokens=4, seed=3)
    asked = Ask(
        request=request, generated=[7, 8, 9], max_context=64, salt="s", adapter="policy@2", routing_start=4
    )
    body = asked.body()
    assert body["token_ids"] == [5, 6, 7, 8, 9]
    assert body["model"] == "policy@2"
    sampling = body["sampling_params"]
    assert (sampling["max_tokens"], sampling["min_tokens"], sampling["seed"]) == (5, 1, 6)
    assert sampling["routed_experts_prompt_start"] == 4


def test_an_answer_ends_where_the_context_does() -> None:
    request = ask("a", prompt=list(np.ones(60, dtype=int)), max_tokens=50)
    assert Ask(request=request, max_context=64, salt="s").max_tokens == 4


def test_events_are_read_from_lines() -> None:
    logprobs = {"content": [{"token_id": 4, "logprob": -0.5}, {"token_id": 9, "logprob": -1.5}]}
    assert parse_event(line(token_ids=[4, 9], logprobs=logprobs, finish_reason=None)) == Event(
        token_ids=(4, 9), logprobs=(-0.5, -1.5)
    )
    spans = [{"version": "3", "start": 0, "end": 2}]
    last = parse_event(
        line(token_ids=[], finish_reason="length", weight_versions=spans, routed_experts="k05V")
    )
    assert last == Event(finish_reason="length", spans=(Span("3", 0, 2),), routes="k05V")
    assert parse_event(b"\n") is None
    assert parse_event(b"data: [DONE]\n") is None


def test_tokens_without_logprobs_are_an_error() -> None:
    with pytest.raises(PenstockError, match="1 tokens with 0 logprobs"):
        parse_event(line(token_ids=[4]))


@pytest.mark.parametrize(("code", "kind"), [(400, PenstockError), (500, EngineLost)])
def test_an_error_in_the_stream_is_raised(code: int, kind: type[Exception]) -> None:
    text = json.dumps({"error": {"message": "EngineCore encountered an issue", "code": code}})
    with pytest.raises(PenstockError, match="EngineCore encountered an issue") as caught:
        parse_event(f"data: {text}".encode())
    assert type(caught.value) is kind


def test_spans_say_the_version_of_every_token() -> None:
    spans = (Span("2", 0, 3), Span("5", 3, 4))
    assert versions_of(spans, 4, fallback=9) == [2, 2, 2, 5]
    assert versions_of((Span("default", 0, 2),), 2, fallback=9) == [9, 9]
    assert versions_of((), 2, fallback=9) == [9, 9]
