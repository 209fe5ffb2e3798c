"""Sums up what a person should know of a run before looking closer: a sentence, figures, warnings with reasons,
and the best, the worst and odd answers. `penstock report` begins with it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from penstock import __version__
from penstock.observe.durations import duration
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.reading.run_warnings import warnings_of
from penstock.observe.reading.sample_table import Rows
from penstock.observe.reading.token_trace import TokenTrace
from penstock.observe.run_state import RECENT_STEPS

TRAINED = (
    ("model", "model.name"),
    ("tasks", "tasks.source"),
    ("held-out tasks", "eval.tasks.source"),
    ("advantage", "algorithm.advantage"),
    ("loss", "algorithm.loss"),
    ("learning rate", "trainer.learning_rate"),
    ("groups a step", "rollout.groups_per_step"),
    ("answers a group", "rollout.group_size"),
    ("longest answer, tokens", "rollout.max_new_tokens"),
    ("temperature", "rollout.temperature"),
    ("bound of staleness", "staleness.max_staleness"),
    ("late groups", "staleness.late"),
    ("engines", "engine.kind"),
    ("seed", "run.seed"),
)
SHOWN = 3
SEARCHED = 2000
"""How many of the newest samples are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    row: int
    why: str


def show_findings(run: RunReading) -> dict[str, Any]:
    bottleneck = run.state.status().bottleneck
    trained = [(name, _setting(run.config, key)) for name, key in TRAINED]
    widest = widest_trace(run)
    return {
        "made": f"penstock {__version__} · began "
        + datetime.fromtimestamp(run.started_s or 0.0, UTC).strftime("%d %B %Y, %H:%M UTC"),
        "lead": _lead(run),
        "facts": _facts(run),
        "warnings": [msgspec.to_builtins(one) for one in warnings_of(run)],
        "trained": [(name, value) for name, value in trained if value],
        "limit": None if bottleneck is None else f"It was limited by {bottleneck.who}: {bottleneck.why}.",
        "answers": [
            (title, [msgspec.to_builtins(one) for one in chosen])
            for title, chosen in (("Best", best(run)), ("Worst", worst(run)), ("Odd", odd(run)))
        ],
        "widest": None
        if widest is None or widest.worst is None
        else {
            "row": row_of(run, widest),
            "step": widest.step,
            "group": widest.group,
            "gap": abs(float(widest.gaps[widest.worst])),
        },
    }


def _lead(run: RunReading) -> str:
    status = run.status()
    how = "ended" if status.phase == "done" else f"stopped while {status.phase}"
    how = "is running" if run.is_running else how
    words = f"{status.step} of {status.steps} steps in {duration(run.now)}; it {how}."
    if len(status.heldout) > 1:
        return f"{words} Held-out reward went from {status.heldout[0][1]:.3f} to {status.heldout[-1][1]:.3f}."
    if status.first_reward is not None and status.reward is not None:
        return f"{words} Training reward went from {status.first_reward:.3f} to {status.reward:.3f}."
    return words


def _facts(run: RunReading) -> list[tuple[str, str]]:
    status, cost = run.status(), run.cost()
    facts = [
        ("steps", f"{status.step:,}"),
        ("samples trained", f"{status.samples:,}"),
        ("tokens while training", f"{cost.tokens_training:,.0f}"),
        (f"reward, last {RECENT_STEPS} steps", "–" if status.reward is None else f"{status.reward:.3f}"),
        ("groups dropped", f"{sum(status.drops.values()):,}"),
        ("staleness, max", f"{status.staleness_max:.0f}"),
    ]
    if cost.num_gpus:
        facts += [
            ("GPU-hours", f"{cost.gpu_hours:.2f}"),
            ("all tokens per GPU-hour", f"{cost.tokens_per_gpu_hour or 0:,.0f}"),
        ]
    if cost.price is not None:
        facts.append(("cost", f"{cost.price:,.2f}"))
    return facts


def _setting(config: Mapping[str, Any], key: str) -> str:
    value: Any = config
    for word in key.split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    return "" if value is None else str(value)


def widest_trace(run: RunReading) -> TokenTrace | None:
    """Return the answer, among the last traced ones, on which engine and trainer differ most."""
    traces = (trace for key in run.traced[-40:] for trace in run.tokens(*key) if trace.worst is not None)
    return max(traces, key=lambda trace: abs(float(trace.gaps[trace.worst or 0])), default=None)


def row_of(run: RunReading, trace: TokenTrace) -> int | None:
    """Return the sample that has these tokens, if it is kept."""
    for row in reversed(run.samples.select(group=trace.group).tolist()):
        if (run.samples.columns["episode"][row], run.samples.columns["step"][row]) == (
            trace.episode,
            trace.step,
        ):
            return int(row)
    return None


def best(run: RunReading) -> list[Chosen]:
    return _by_reward(run, highest=True)


def worst(run: RunReading) -> list[Chosen]:
    return _by_reward(run, highest=False)


def odd(run: RunReading) -> list[Chosen]:
    """Return unusual answers, each once."""
    found: dict[int, Chosen] = {}
    for chosen in _odd(run):
        found.setdefault(chosen.row, chosen)
    return list(found.values())


def _by_reward(run: RunReading, *, highest: bool) -> list[Chosen]:
    """Return the answers with the highest or lowest rewards, newest first among equals. A group gives only one,
    so that no task fills the list."""
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
    """Find the answer whose advantage is furthest from zero."""
    heads = ((row, run.samples.head(row).advantage) for row in rows[-SEARCHED:].tolist())
    known = [(abs(advantage), row) for row, advantage in heads if advantage is not None]
    if known:
        size, row = max(known)
        yield Chosen(row=row, why=f"most unlike the rest of its group: advantage ±{size:.2f}")


def _repeated(run: RunReading, rows: Rows) -> Iterator[Chosen]:
    """Find a text that answers many tasks: the model may have found one answer that pays."""
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
