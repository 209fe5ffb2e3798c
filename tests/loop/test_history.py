import numpy as np
import pytest

from penstock.loop.history import VersionHistory
from penstock.records import codec


def test_versions_only_grow_and_know_their_step() -> None:
    history = VersionHistory("policy")
    assert [history.issue(step) for step in (0, 1, 2, 4)] == [0, 1, 2, 3]
    assert [history.step_of(version) for version in range(4)] == [0, 1, 2, 4]
    assert history.steps_of(np.array([-1, 3, 0, -1], np.int32)).tolist() == [-1, 4, 0, -1]


def test_a_rollback_uses_no_version_again() -> None:
    history = VersionHistory(steps=[0, 1, 2, 3])
    history.roll_back(1)
    assert [history.step_of(version) for version in range(4)] == [0, 1, 1, 1]
    assert history.issue(1) == 4
    assert history.issue(2) == 5
    assert history.newest == 5


def test_versions_of_steps_that_are_made_again_keep_their_steps() -> None:
    history = VersionHistory(steps=[0, 1, 2, 3, 4])
    history.roll_back(1, num_again=2)
    assert history.steps == (0, 1, 2, 3, 3)
    history.withdraw(history.issue(2))
    assert (history.issue(2), history.versions_of(2), history.versions_of(3)) == (6, (5, 6), ())


def test_only_versions_since_the_last_rollback_are_known_to_hold_the_weights_of_its_step() -> None:
    history = VersionHistory()
    for step in (0, 1, 1, 2):
        history.issue(step)
    assert (history.versions_of(1), history.versions_of(3)) == ((1, 2), ())
    history.roll_back(1)
    history.issue(1)
    assert history.steps == (0, 1, 1, 1, 1)
    assert history.versions_of(1) == (4,)  # 3 was of step 2, which is undone
    assert VersionHistory.of(history.state()).versions_of(1) == ()


def test_a_version_without_weights_leaves_its_step_to_the_next() -> None:
    history = VersionHistory(steps=[0, 1])
    history.withdraw(history.issue(2))
    assert [history.step_of(version) for version in range(3)] == [0, 1, 1]
    assert (history.issue(1), history.issue(2)) == (3, 4)


def test_what_was_never_issued_has_no_step() -> None:
    history = VersionHistory("coder", steps=[0])
    for version in (-1, 1):
        with pytest.raises(
            ValueError, match=f"version {version} of 'coder' was never issued; the newest is 0"
        ):
            history.step_of(version)
    with pytest.raises(ValueError, match="version 7 of 'coder'"):
        history.steps_of(np.array([0, 7], np.int32))


def test_steps_come_in_order() -> None:
    history = VersionHistory(steps=[0, 5])
    history.issue(3)
    with pytest.raises(ValueError, match="got step 2 after 3; roll_back first"):
        history.issue(2)


def test_its_state_travels() -> None:
    state = VersionHistory("coder", steps=[0, 2]).state()
    other = VersionHistory.of(codec.decode(codec.encode(state), type(state)))
    assert (other.policy, other.newest, other.issue(3)) == ("coder", 1, 2)
