"""Knows which optimizer step each published version of a policy holds.

A version is a publish number: it only grows and is never reused, not even after a rollback. A step is an optimizer
step of the surviving history, and steps can be rolled back. Undone steps whose groups came back are made again,
from the same groups in the same order, so their versions keep their steps, and nothing ages meanwhile.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.records import DEFAULT_POLICY, NOT_SAMPLED, IntArray


class HistoryState(msgspec.Struct, frozen=True, kw_only=True):
    """Holds a history as data: `steps[version]` is the step of each version issued so far."""

    policy: str
    steps: tuple[int, ...]


class VersionHistory:
    """Issues the versions of one policy, and knows the step of each."""

    def __init__(self, policy: str = DEFAULT_POLICY, steps: Sequence[int] = ()) -> None:
        self.policy = policy
        self._steps = list(steps)
        self._first_sure = len(self._steps)
        """Versions before it may be of steps that were undone."""

    @classmethod
    def of(cls, state: HistoryState) -> "VersionHistory":
        return cls(state.policy, state.steps)

    def state(self) -> HistoryState:
        return HistoryState(policy=self.policy, steps=self.steps)

    @property
    def newest(self) -> int:
        """Return the last version issued; -1 before the first."""
        return len(self._steps) - 1

    def issue(self, step: int) -> int:
        """Issue a new version for the weights that `step` made; step 0 is the start."""
        if len(self._steps) > self._first_sure and step < self._steps[-1]:
            raise ValueError(
                f"versions of {self.policy!r} must be issued in the order of steps, got step {step} after "
                f"{self._steps[-1]}; roll_back first"
            )
        self._steps.append(step)
        return self.newest

    def withdraw(self, version: int) -> None:
        """Note that no weights were made for the newest version. Its number stays used, and maps to the step of
        the version before it."""
        assert 0 < version == self.newest
        self._steps[version] = min(self._steps[version - 1 : version + 1])

    def step_of(self, version: int) -> int:
        if not 0 <= version <= self.newest:
            raise ValueError(
                f"version {version} of {self.policy!r} was never issued; the newest is {self.newest}"
            )
        return self._steps[version]

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the step of every version, as it is now."""
        return tuple(self._steps)

    def steps_of(self, versions: IntArray) -> IntArray:
        """Map every token's version to its step; `NOT_SAMPLED` stays as it is."""
        if versions.size and (newest := int(versions.max())) != NOT_SAMPLED:
            self.step_of(newest)
        # NOT_SAMPLED is -1, so it finds the last entry, which is itself.
        return np.array([*self._steps, NOT_SAMPLED], dtype=np.int32)[versions]

    def roll_back(self, step: int, num_again: int = 0) -> None:
        """Undo the steps after `step`; `num_again` of them will be made again from the same groups. Versions of
        steps after those map to the last step that is made again."""
        self._steps = [min(one, step + num_again) for one in self._steps]
        self._first_sure = len(self._steps)

    def versions_of(self, step: int) -> tuple[int, ...]:
        """Return the versions that hold the weights of `step` and no others. Those from before a rollback are
        left out."""
        newest = range(self._first_sure, len(self._steps))
        return tuple(version for version in newest if self._steps[version] == step)
