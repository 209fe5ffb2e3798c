from typing import Any

import pytest
from pydantic import ValidationError

from penstock.scoring.config import RewardConfig


@pytest.mark.parametrize(
    "functions",
    ["a:f", ["a:f"], {"path": "a:f"}, [{"path": "a:f"}], [{"path": "a:f", "weight": 1.0, "name": None}]],
)
def test_one_function_has_many_spellings(functions: Any) -> None:
    (function,) = RewardConfig.model_validate({"functions": functions}).functions
    assert (function.path, function.weight, function.name) == ("a:f", 1.0, None)


def test_several_functions_with_weights() -> None:
    config = RewardConfig.model_validate(
        {"functions": ["a:f", {"path": "b.py:g", "weight": -0.5, "name": "short"}]}
    )
    assert [(one.path, one.weight, one.name) for one in config.functions] == [
        ("a:f", 1.0, None),
        ("b.py:g", -0.5, "short"),
    ]


def test_a_dumped_section_is_the_same_when_read_again() -> None:
    config = RewardConfig.model_validate({"functions": [{"path": "a:f", "weight": 2.0}], "workers": 3})
    assert RewardConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    "section",
    [
        {"functions": []},
        {"functions": 3},
        {"functions": [{"path": "a:f", "weight": float("nan")}]},
        {"workers": 0},
        {"timeout_s": 0},
    ],
)
def test_impossible_values_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RewardConfig.model_validate(section)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3"])
def test_devices(device: str) -> None:
    assert RewardConfig(device=device).device == device


def test_another_device_is_refused() -> None:
    with pytest.raises(ValidationError, match="reward.device must be cpu, cuda or cuda:N, got 'gpu0'"):
        RewardConfig(device="gpu0")
