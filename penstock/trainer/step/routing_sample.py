"""Measures what replaying experts gains: |Δ logprob| between engine and trainer on a few sequences of a step.

The gap with replay comes from the step's own forward pass; the gap without needs one more pass over these
sequences.
"""

from collections.abc import Iterable, Sequence

import torch

from penstock.records import Metric, TrainSequence
from penstock.trainer.step.sharing import forward_length, num_loss_positions
from penstock.trainer.step.step_metrics import StepRecord, mean_of
from penstock.trainer.step.step_preparation import PreparedRow

SAMPLED_TOKENS = 256
"""How many tokens of a step are computed once more; at least one sequence is, however long."""


def choose_sample(sequences: Iterable[TrainSequence]) -> list[TrainSequence]:
    """Choose the shortest sequences of a step that have recorded routes: they cost little, and differ from step
    to step."""
    recorded = [
        sequence for sequence in sequences if sequence.sample.routing and num_loss_positions(sequence.sample)
    ]
    chosen, num_tokens = list[TrainSequence](), 0
    for sequence in sorted(recorded, key=lambda each: forward_length(each.sample)):
        if num_tokens >= SAMPLED_TOKENS:
            break
        chosen.append(sequence)
        num_tokens += forward_length(sequence.sample)
    return chosen


def routing_gaps(
    record: StepRecord, rows: Sequence[PreparedRow], sample: Sequence[TrainSequence]
) -> dict[str, Metric]:
    """Return the gaps with and without replay, or nothing if no experts were recorded. `record` is that of the
    step's first pass over `rows`."""
    without = record.gap_without_replay
    if without is None:
        return {}
    chosen = {id(sequence) for sequence in sample}
    parts = []
    for prepared in rows:
        row = prepared.row
        is_chosen = torch.tensor([id(sequence) in chosen for sequence in row.sequences])
        parts.append(is_chosen[row.segments.cpu()])
    seen = torch.cat(parts) & (record.column("left_out") == 0)
    gaps = {
        "routing_gap": record.column("gap")[seen].abs(),
        "routing_gap_without": without[without.isfinite()],
    }
    return {name: mean_of(gap) for name, gap in gaps.items() if gap.numel()}
