"""When the groups under way were generated and scored: from that follows what a trainer waited for, and how much of
a token's age it gained while generating and while waiting."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.observe.slots import Slots

GENERATION, SCORING, ADMISSION, JOURNAL = "generation", "scoring", "admission", "journal"
"""What a trainer waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLife:
    """A group until its step."""

    began: float
    generated: float
    """When its last episode ended."""
    generated_at: int
    """The step of the trainer's weights then."""
    scored: float | None = None
    slot: int | None = None
    """Of the track on which it waits for its step."""


class GroupLives:
    """By the number of the group, from the end of its generation to its step or its drop."""

    def __init__(self) -> None:
        self._lives: dict[int, GroupLife] = {}
        self._slots = Slots()

    def generated(self, group: int, began: float, now: float, step: int) -> None:
        self._lives[group] = GroupLife(began=began, generated=now, generated_at=step)

    def scored(self, group: int, now: float) -> None:
        life = self._lives.get(group)
        if life is not None:
            self._lives[group] = replace(life, scored=now, slot=self._slots.take())

    def step_generated(self, group: int, otherwise: int) -> int:
        """The step of the weights when its generation ended. Groups from before a restart have `otherwise`."""
        life = self._lives.get(group)
        return otherwise if life is None else life.generated_at

    def end(self, group: int) -> GroupLife | None:
        """It was trained or dropped. None: nobody saw it being generated."""
        life = self._lives.pop(group, None)
        if life is not None and life.slot is not None:
            self._slots.give_back(life.slot)
        return life

    def waits(self, groups: Iterable[int], start: float, end: float) -> dict[str, float]:
        """A wait for these groups, by what the last of them to be scored was doing meanwhile."""
        if end <= start:
            return {}
        known = [life for group in groups if (life := self._lives.get(group)) is not None]
        last = max(known, key=lambda life: life.scored or life.generated, default=None)
        if last is None:
            return {GENERATION: end - start}
        scored = last.generated if last.scored is None else last.scored
        bounds = [start, *(min(end, max(start, time)) for time in (last.began, last.generated, scored)), end]
        parts = zip((ADMISSION, GENERATION, SCORING, JOURNAL), bounds, bounds[1:], strict=False)
        return {cause: until - since for cause, since, until in parts if until > since}
