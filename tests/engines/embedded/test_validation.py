from typing import Any

import pytest

from penstock.engines.embedded.validation import check_request
from penstock.errors import RequestRefused
from tests.engines.contract import ask

LIMITS: dict[str, Any] = {
    "policies": ("policy",),
    "vocab_size": 10,
    "max_context": 32,
    "cache_tokens": 24,
    "has_tokenizer": False,
    "is_known": False,
}


def test_accepts_what_fits() -> None:
    check_request(ask("a", [0, 9] * 4, max_tokens=16), **LIMITS)
    check_request(ask("a", [1], max_tokens=23, stop=("x",)), **{**LIMITS, "has_tokenizer": True})
    check_request(ask("a", [1], max_tokens=99), **{**LIMITS, "cache_tokens": 32})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1] * 32}, "prompt has 32 tokens and the context holds 32"),
        ({"max_tokens": 99}, "may grow to 32 tokens and the cache holds 24; raise engine.embedded.kv_tokens"),
        ({"prompt": [10], "max_tokens": 1}, r"token ids must be in 0\.\.9"),
        ({"prompt": [-1], "max_tokens": 1}, r"token ids must be in 0\.\.9"),
        ({"max_tokens": 2, "stop_token_ids": (10,)}, "stop and bias ids"),
        ({"max_tokens": 2, "logit_bias": {-1: 1.0}}, "stop and bias ids"),
        ({"max_tokens": 2, "stop": ("x",)}, "need an engine with a tokenizer"),
        ({"max_tokens": 2, "policy": "other"}, "serves policy 'policy', got 'other'"),
        ({"max_tokens": 2, "routing_start": 4}, r"routing_start must be in 0\.\.3, .*, got 4"),
        ({"max_tokens": 2, "chunk_tokens": 0}, "chunk_tokens must be >= 1, got 0"),
    ],
)
def test_refuses_with_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused, match=f"request 'a' was refused: .*{message}"):
        check_request(ask("a", **options), **LIMITS)


def test_refuses_an_id_in_use() -> None:
    with pytest.raises(RequestRefused, match="id is in use"):
        check_request(ask("a", max_tokens=2), **{**LIMITS, "is_known": True})
