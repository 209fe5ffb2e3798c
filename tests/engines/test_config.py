import pytest

from penstock.engines.config import EngineConfig


def test_there_is_a_section_for_each_engine() -> None:
    (one, two) = EngineConfig(count=2).members
    assert (one.kind, one.count, two.kind) == ("embedded", 1, "embedded")


def test_servers_that_are_joined_are_one_engine_each() -> None:
    config = EngineConfig(kind="vllm", vllm={"urls": ["http://a:1", "http://b:2"]})
    assert [member.vllm.urls for member in config.members] == [("http://a:1",), ("http://b:2",)]


def test_kinds_can_be_mixed() -> None:
    config = EngineConfig(count=2, beside={"vllm": 1})
    assert [member.kind for member in config.members] == ["embedded", "embedded", "vllm"]
    assert all(member.beside == {} for member in config.members)
    assert config.kinds == ("embedded", "vllm")


def test_a_kind_is_named_once() -> None:
    with pytest.raises(
        ValueError, match="beside must name other kinds than embedded, got 2 of it; raise count"
    ):
        EngineConfig(beside={"embedded": 2})


def test_a_url_must_look_like_one() -> None:
    with pytest.raises(ValueError, match="urls must begin with http://, https:// or unix:, got 'host:8000'"):
        EngineConfig(kind="vllm", vllm={"urls": ["host:8000"]})


def test_a_range_starts_with_the_least_and_allows_the_most() -> None:
    config = EngineConfig.model_validate({"count": {"min": 2, "max": 5}, "beside": {"vllm": 1}})
    assert (config.num_first, config.num_most, len(config.members)) == (2, 5, 3)
    assert [config.member(index).kind for index in range(5)] == ["embedded", "embedded", "vllm"] + [
        "embedded"
    ] * 2
    assert EngineConfig.model_validate({"count": {"max": 3}}).num_first == 1
    with pytest.raises(ValueError, match="max must be at least min, got min=3 and max=2"):
        EngineConfig.model_validate({"count": {"min": 3, "max": 2}})
    with pytest.raises(ValueError, match=r"count must be a number where vllm\.urls name servers"):
        EngineConfig.model_validate({"kind": "vllm", "count": {"max": 2}, "vllm": {"urls": ["http://a:1"]}})
