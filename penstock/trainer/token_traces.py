"""What a step knows of single tokens, for a few answers: those that the plan asks for, and the one on which engine
and trainer differ most. The columns are there for the step's metrics anyway, so this only cuts them out."""

from collections.abc import Sequence

import numpy as np

from penstock.trainer.step_metrics import StepRecord
from penstock.trainer.step_preparation import PreparedRow
from penstock.types import FloatArray, StepPlan, TracedTokens, TrainSequence

MAX_TOKENS = 65_536
"""Loss tokens of a step that are handed back; the first answer comes whole, however long."""


def trace_tokens(record: StepRecord, rows: Sequence[PreparedRow], plan: StepPlan) -> tuple[TracedTokens, ...]:
    """`record` is that of a pass over these rows."""
    if not plan.traced:
        return ()
    columns = {name: record.column(name).numpy() for name in ("gap", "advantage", "weight", "clip_fraction")}
    columns["gap"] = np.where(record.column("left_out").numpy() != 0, np.nan, columns["gap"])
    places = list(_places(rows))
    asked = set(plan.traced)
    chosen = [place for place in places if (place[0].group, place[0].episode) in asked]
    widest = _widest(places, columns["gap"])
    if widest is not None and all(place is not widest for place in chosen):
        chosen.insert(0, widest)
    traces: list[TracedTokens] = []
    num_tokens = 0
    for sequence, tokens in chosen:
        num_tokens += tokens.stop - tokens.start
        if traces and num_tokens > MAX_TOKENS:
            break
        traces.append(_trace(sequence, {name: column[tokens] for name, column in columns.items()}))
    return tuple(traces)


Place = tuple[TrainSequence, slice]


def _places(rows: Sequence[PreparedRow]) -> list[Place]:
    """Every sequence, and where its loss tokens are in the columns."""
    places, start = list[Place](), 0
    for prepared in rows:
        for sequence, count in zip(prepared.row.sequences, prepared.row.counts, strict=True):
            places.append((sequence, slice(start, start + count)))
            start += count
    return places


def _widest(places: Sequence[Place], gaps: FloatArray) -> Place | None:
    if not places:
        return None
    sizes = np.nan_to_num(np.abs(gaps[: places[-1][1].stop]), nan=0.0)
    starts = [tokens.start for _, tokens in places]
    return places[int(np.argmax(np.maximum.reduceat(sizes, starts)))] if sizes.size else None


def _trace(sequence: TrainSequence, columns: dict[str, FloatArray]) -> TracedTokens:
    clipped = columns["clip_fraction"]
    return TracedTokens(
        group=sequence.group,
        episode=sequence.episode,
        number=sequence.number,
        gaps=columns["gap"].astype(np.float32),
        advantages=columns["advantage"].astype(np.float32),
        weights=columns["weight"].astype(np.float32),
        clipped=clipped.astype(np.float32) if clipped.size == columns["gap"].size else None,
    )
