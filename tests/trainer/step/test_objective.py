"""Corrections that do nothing are named when the trainer starts."""

from pathlib import Path
from typing import Any

import pytest

from penstock.algorithms.config import AlgorithmConfig
from penstock.algorithms.corrections import CORRECTIONS
from penstock.trainer.step.objective import idle_corrections

BEHAVIOUR = (
    "algorithm.{} does nothing: algorithm.proximal=behaviour leaves the loss's own ratio no gap to correct; set "
    "algorithm.proximal=start, or take it out"
)
DECOUPLED = "algorithm.{} does nothing: algorithm.loss=decoupled weights by that gap itself; take it out"
WEIGHTS = ("truncated_token", "truncated_sequence")
ALL: dict[str, Any] = {name: {} for name in CORRECTIONS.names()}


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({}, []),
        ({"corrections": ALL}, [BEHAVIOUR.format(f"corrections.{name}") for name in WEIGHTS]),
        ({"engine_corrections": ALL}, [BEHAVIOUR.format(f"engine_corrections.{name}") for name in WEIGHTS]),
        ({"corrections": ALL, "engine_corrections": ALL, "proximal": "start"}, []),
        ({"corrections": {"truncated_token": {"cap": 0.5}}}, []),  # it halves every weight
        (
            {"corrections": ALL, "engine_corrections": ALL, "loss": "decoupled"},
            [
                DECOUPLED.format(f"{section}.{name}")
                for section in ("corrections", "engine_corrections")
                for name in WEIGHTS
            ],
        ),
    ],
)
def test_weights_of_a_gap_that_the_loss_covers_do_nothing(algorithm: dict[str, Any], said: list[str]) -> None:
    assert idle_corrections(AlgorithmConfig(**{"corrections": {}, **algorithm})) == said


def test_users_corrections_are_tried_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def idle(tokens):\n    return tokens.uncovered().exp().clamp(max=3.0)\n"
        "def acts(tokens):\n    return (tokens.ages < 5).float()\n"
        "def never(tokens):\n    return tokens.ages * 0 + 1\n"
        "def unknown(tokens):\n    return tokens.columns['teacher']\n"
    )
    corrections = {f"{file}:{name}": {} for name in ("idle", "acts", "never", "unknown")}
    said = idle_corrections(AlgorithmConfig(corrections=corrections))
    assert said == [BEHAVIOUR.format(f"corrections.{file}:idle")]
