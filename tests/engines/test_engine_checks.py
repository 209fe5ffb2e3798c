from typing import Any

import msgspec
import pytest

from penstock.engines.engine_checks import check_request, check_update, embedded_rules
from penstock.errors import BaseMissing, PenstockError, RequestRefused
from penstock.records import AdapterSpec
from tests.engines.contract import ask, update_to

ENGINE = {"name": "engine0", "versions": {"policy": 4}, "interrupts": ("inflight",)}


def test_newer_versions_pass_and_parts_on_top_of_their_base() -> None:
    check_update(update_to(9), "inflight", **ENGINE)
    check_update(update_to(9, base=4), "inflight", **ENGINE)


def adapter_to(version, base, **options):
    spec = AdapterSpec(rank=2, alpha=4.0)
    return update_to(version, selection="adapter", base=base, adapter=spec, **options)


def test_adapters_are_on_top_of_the_full_weights_whatever_their_policy_serves() -> None:
    check_update(adapter_to(9, 2), "inflight", **ENGINE, base=2)
    check_update(adapter_to(1, 2, policy="new"), "inflight", **ENGINE, base=2, adds_policies=True)
    with pytest.raises(
        BaseMissing, match="serves version 2, got an update to 9 that holds only an adapter for version 4"
    ):
        check_update(adapter_to(9, 4), "inflight", **ENGINE, base=2)
    with pytest.raises(PenstockError, match="serves policy 'policy', got an update of 'new'"):
        check_update(adapter_to(1, 2, policy="new"), "inflight", **ENGINE, base=2)


@pytest.mark.parametrize(
    ("update", "interrupt", "message"),
    [
        (update_to(5), "drain", "engine0 can't update with interrupt 'drain'; set sync.interrupt=inflight"),
        (update_to(5, policy="b"), "inflight", "engine0 serves policy 'policy', got an update of 'b'"),
        (update_to(4), "inflight", "engine0 serves version 4, got an update to 4"),
        (update_to(6, base=5), "inflight", "serves version 4, got an update to 6 .* since version 5"),
    ],
)
def test_what_an_engine_refuses(update, interrupt, message) -> None:
    with pytest.raises(PenstockError, match=message):
        check_update(update, interrupt, **ENGINE)


def test_after_half_an_update_only_a_full_one_will_do() -> None:
    with pytest.raises(PenstockError, match="has weights of no version, got an update to 6"):
        check_update(update_to(6, base=4), "inflight", **ENGINE, is_intact=False)
    check_update(update_to(6), "inflight", **ENGINE, is_intact=False)


def test_a_part_must_name_its_base() -> None:
    with pytest.raises(ValueError, match="selection 'adapter' must name its base"):
        update_to(6, selection="adapter")


def test_full_weights_of_any_version_end_half_an_update() -> None:
    """Those below an adapter are older than what was served."""
    check_update(update_to(2), "inflight", **ENGINE, is_intact=False)
    with pytest.raises(PenstockError, match="serves version 4, got an update to 2"):
        check_update(update_to(2), "inflight", **ENGINE)
    with pytest.raises(BaseMissing, match="has weights of no version, got an update to 5"):
        check_update(adapter_to(5, 4), "inflight", **ENGINE, is_intact=False)


LIMITS: dict[str, Any] = {"vocab_size": 10, "max_context": 32}
CACHE: dict[str, Any] = {"cache_tokens": 24, "has_tokenizer": False}


def check(request, *, is_known=False, **cache) -> None:
    rules = embedded_rules(request, **LIMITS, **{**CACHE, **cache})
    check_request(
        request, policies=("policy",), **LIMITS, is_known=is_known, records_masks=True, further=rules
    )


def test_accepts_what_fits() -> None:
    check(ask("a", [0, 9] * 4, max_tokens=16))
    check(ask("a", [1], max_tokens=23, stop=("x",)), has_tokenizer=True)
    check(ask("a", [1], max_tokens=99), cache_tokens=32)


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
        check(ask("a", **options))


def test_refuses_an_id_in_use() -> None:
    with pytest.raises(RequestRefused, match="id is in use"):
        check(ask("a", max_tokens=2), is_known=True)


def test_masks_are_refused_by_an_engine_that_records_none() -> None:
    request = msgspec.structs.replace(ask("a", [1], max_tokens=2), record_sampling_mask=True)
    check(request)
    with pytest.raises(RequestRefused, match="records no sampling masks; use engine.kind=embedded"):
        check_request(request, policies=("policy",), **LIMITS, is_known=False)
