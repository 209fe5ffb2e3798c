"""What a run says when it begins."""

import pytest

from penstock.config.root import RunConfig
from penstock.durability.checkpoints import Part
from penstock.run.beginning import what_a_crash_costs


@pytest.mark.parametrize(
    ("every", "only_in_python", "said"),
    [
        (0, (), "a crash would cost all of this run: it keeps no checkpoints and no journal"),
        (
            0,
            ("reward",),
            "can't resume this run after a crash: it was given its reward as a Python object",
        ),
        (
            50,
            ("reward", "tasks"),
            "can't resume this run after a crash: it was given its reward and tasks as",
        ),
        (50, (), None),
    ],
)
def test_a_run_that_could_not_be_resumed_says_so(
    every: int, only_in_python: tuple[Part, ...], said: str | None
) -> None:
    line = what_a_crash_costs(RunConfig(checkpoint_every=every), only_in_python)
    assert line is None if said is None else said in str(line)
