"""Counts how old the trained tokens were, and what another staleness bound would have meant."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.observe.events import Drop, StalenessEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeBar:
    """Counts tokens of one age. `generating` and `waiting` say how the age was gained, in steps, on average."""

    age: int
    tokens: int
    generating: float
    waiting: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCount:
    """Counts what another bound would have meant for the run as it was. It does not predict another run."""

    bound: int
    groups_too_old: int
    """Trained groups with a token past the bound."""
    tokens_too_old: int
    """Trained loss tokens past the bound."""
    drops_spared: int
    """Groups that were dropped as too old and are within this bound."""


class StalenessTable:
    """Keeps the staleness of all steps that were not undone."""

    def __init__(self) -> None:
        self._events: dict[int, StalenessEvent] = {}

    def add(self, event: StalenessEvent) -> None:
        for step in (
            [step for step in self._events if step >= event.step] if event.step in self._events else []
        ):
            del self._events[step]
        self._events[event.step] = event

    def cells(self, first_step: int | None = None, last_step: int | None = None) -> Counter[tuple[int, int]]:
        """Return loss tokens by (steps while generating, steps while waiting)."""
        cells: Counter[tuple[int, int]] = Counter()
        for event in self._between(first_step, last_step):
            for generating, waiting, tokens in event.tokens:
                cells[generating, waiting] += tokens
        return cells

    def histogram(self, first_step: int | None = None, last_step: int | None = None) -> list[AgeBar]:
        """Return a bar for each age, youngest first, also for ages without tokens in between."""
        by_age: dict[int, list[tuple[int, int, int]]] = {}
        for (generating, waiting), tokens in self.cells(first_step, last_step).items():
            by_age.setdefault(generating + waiting, []).append((generating, waiting, tokens))
        return [_bar(age, by_age.get(age, ())) for age in range(max(by_age, default=-1) + 1)]

    def generating(self, first_step: int | None = None, last_step: int | None = None) -> dict[int, int]:
        """Return tokens by the steps that passed while their group was generated."""
        return _marginal(self.cells(first_step, last_step), 0)

    def waiting(self, first_step: int | None = None, last_step: int | None = None) -> dict[int, int]:
        """Return tokens by the steps that passed while their group waited for its score and its step."""
        return _marginal(self.cells(first_step, last_step), 1)

    def what_if(self, drops: Iterable[Drop] = ()) -> list[BoundCount]:
        """Return counts for every bound up to the age of the oldest token that was trained or dropped."""
        tokens, groups = Counter[int](), Counter[int]()
        for (generating, waiting), count in self.cells().items():
            tokens[generating + waiting] += count
        for event in self._events.values():
            for age, count in event.groups:
                groups[age] += count
        stale = Counter(drop.age for drop in drops if drop.reason == "stale" and drop.age is not None)
        oldest = max((*tokens, *groups, *stale), default=-1)
        return [
            BoundCount(
                bound=bound,
                groups_too_old=_above(groups, bound),
                tokens_too_old=_above(tokens, bound),
                drops_spared=sum(count for age, count in stale.items() if age <= bound),
            )
            for bound in range(oldest + 1)
        ]

    def _between(self, first: int | None, last: int | None) -> list[StalenessEvent]:
        return [
            event
            for step, event in self._events.items()
            if (first is None or step >= first) and (last is None or step <= last)
        ]


def _bar(age: int, parts: Sequence[tuple[int, int, int]]) -> AgeBar:
    tokens = sum(count for *_, count in parts)
    mean = 1 / tokens if tokens else 0.0
    return AgeBar(
        age=age,
        tokens=tokens,
        generating=sum(generating * count for generating, _, count in parts) * mean,
        waiting=sum(waiting * count for _, waiting, count in parts) * mean,
    )


def _marginal(cells: Counter[tuple[int, int]], which: int) -> dict[int, int]:
    found: Counter[int] = Counter()
    for ages, tokens in cells.items():
        found[ages[which]] += tokens
    return dict(sorted(found.items()))


def _above(counts: Counter[int], bound: int) -> int:
    return sum(count for age, count in counts.items() if age > bound)
