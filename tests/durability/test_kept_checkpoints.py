import math
from pathlib import Path

import pytest

from penstock.durability.kept_checkpoints import (
    best_of,
    checkpoints_of,
    keep_reward,
    rewards_of,
    superfluous,
    sweep_unfinished,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run with checkpoints of steps 2 and 4, and folders that were never named as one."""
    folder = tmp_path / "checkpoints"
    for name in ("step-2", "step-4", "step-x", ".step-8.ab12", ".step-1.old"):
        (folder / name).mkdir(parents=True)
    for name in ("step-2", "step-4"):
        (folder / name / "progress.json").touch()
    return folder


def test_only_those_with_a_name_are_found(folder: Path) -> None:
    assert checkpoints_of(folder.parent) == {2: folder / "step-2", 4: folder / "step-4"}


def test_leftovers_are_swept_and_links_name_what_is_there(folder: Path) -> None:
    (folder / "latest").symlink_to("step-6x")
    (folder / "best").symlink_to("gone")
    (folder / ".latest.new").symlink_to("gone")
    for name in (".model.x7", "model"):
        (folder.parent / name).mkdir()
    sweep_unfinished(folder.parent)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoints", "model"]
    found = sorted(path.name for path in folder.iterdir())
    assert found == ["latest", "step-2", "step-4", "step-x"]
    assert (folder / "latest").readlink() == Path("step-4")
    keep_reward(folder / "step-2", 0.5)
    sweep_unfinished(folder.parent)
    assert (folder / "best").readlink() == Path("step-2")


def test_a_model_whose_replacement_was_killed_between_two_names_comes_back(tmp_path: Path) -> None:
    for name, text in ((".model.a1/old", "before"), (".model.b2", "half named")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(text)
    sweep_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "config.json").read_text() == "before"


def test_rewards_stay_with_their_checkpoints(folder: Path) -> None:
    keep_reward(folder / "step-2", 0.25)
    keep_reward(folder / "step-4", math.nan)
    assert rewards_of(folder.parent) == {2: 0.25}
    keep_reward(folder / "step-4", 0.5)
    assert rewards_of(folder.parent) == {2: 0.25, 4: 0.5}


def test_the_last_of_the_best_is_the_best() -> None:
    assert best_of({2: 0.5, 4: 0.75, 6: 0.75, 8: 0.0}) == 6
    assert best_of({}) is None


@pytest.mark.parametrize(
    ("keep", "rewards", "evaluating", "gone"),
    [
        (1, {}, (), [2, 4, 6, 12]),
        (2, {}, (), [2, 4, 12]),
        (9, {}, (), [12]),
        (1, {2: 0.5, 4: 0.75}, (), [2, 6, 12]),
        (1, {4: 0.75}, (6,), [2, 12]),
        (1, {12: 1.0, 2: 0.5}, (), [4, 6, 12]),  # the best of a history that was given up is none
    ],
)
def test_the_last_few_and_the_best_are_kept(
    keep: int, rewards: dict[int, float], evaluating: tuple[int, ...], gone: list[int]
) -> None:
    found = superfluous([2, 4, 6, 8, 12], step=8, keep=keep, rewards=rewards, evaluating=evaluating)
    assert found == gone
