"""Which answers a report shows: the best, the worst, and odd ones with what is odd about them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.observe.reading.run_reading import RunReading
from penstock.observe.reading.sample_table import Rows

SHOWN = 3
SEARCHED = 2000
"""The newest samples whose texts are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    row: int
    why: str


def best(run: RunReading) -> list[Chosen]:
    return _by_reward(run, highest=True)


def worst(run: RunReading) -> list[Chosen]:
    return _by_reward(run, highest=False)


def odd(run: RunReading) -> list[Chosen]:
    """At most one of each kind."""
    found: dict[int, Chosen] = {}
    for chosen in _odd(run):
        found.setdefault(chosen.row, chosen)
    return list(found.values())


def _by_reward(run: RunReading, *, highest: bool) -> list[Chosen]:
    """Of the newest first, one a group, so that not one task fills the list."""
    rows = run.samples.select(drop="none")
    rewards = run.samples.columns["reward"][rows] if rows.size else np.zeros(0)
    rows, rewards = rows[np.isfinite(rewards)], rewards[np.isfinite(rewards)]
    order = np.lexsort((-rows, -rewards if highest else rewards))
    chosen, groups = list[Chosen](), set[int]()
    for row in rows[order].tolist():
        head = run.samples.head(row)
        if head.group not in groups:
            groups.add(head.group)
            chosen.append(Chosen(row=row, why=f"reward {head.reward:.3g}"))
        if len(chosen) == SHOWN:
            break
    return chosen


def _odd(run: RunReading) -> Iterator[Chosen]:
    rows = run.samples.select(drop="none")
    if not rows.size:
        return
    columns = run.samples.columns
    tokens, rewards, ages = columns["tokens"][rows], columns["reward"][rows], columns["age"][rows]
    longest = int(rows[int(tokens.argmax())])
    yield Chosen(row=longest, why=f"the longest answer: {tokens.max():,} tokens")
    good = rows[rewards >= np.nanmax(rewards)] if np.isfinite(rewards).any() else rows[:0]
    if good.size:
        shortest = int(good[int(columns["tokens"][good].argmin())])
        yield Chosen(row=shortest, why="the shortest answer with the highest reward")
    oldest = int(rows[int(ages.argmax())])
    yield Chosen(row=oldest, why=f"the oldest tokens: {ages.max()} steps behind")
    yield from _against_its_group(run, rows)
    yield from _repeated(run, rows)


def _against_its_group(run: RunReading, rows: Rows) -> Iterator[Chosen]:
    """An answer whose advantage is the largest."""
    heads = ((row, run.samples.head(row).advantage) for row in rows[-SEARCHED:].tolist())
    known = [(abs(advantage), row) for row, advantage in heads if advantage is not None]
    if known:
        size, row = max(known)
        yield Chosen(row=row, why=f"most unlike the rest of its group: advantage ±{size:.2f}")


def _repeated(run: RunReading, rows: Rows) -> Iterator[Chosen]:
    """A text that answers many tasks: a model that found one answer that pays."""
    texts: dict[str, tuple[int, set[str]]] = {}
    counts: Counter[str] = Counter()
    for row in rows[-SEARCHED:].tolist():
        sample = run.samples.read(row)
        if len(sample.answer) > 20:
            texts.setdefault(sample.answer, (row, set()))[1].add(sample.task_id)
            counts[sample.answer] = len(texts[sample.answer][1])
    for text, count in counts.most_common(1):
        if count > 2:
            yield Chosen(row=texts[text][0], why=f"the same answer to {count} tasks")
