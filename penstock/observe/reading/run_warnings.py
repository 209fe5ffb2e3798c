"""Warns of what a person should know of a run before trusting its numbers: rules with reasons, from events
alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.observe.reading.run_reading import RunReading
from penstock.observe.reading.step_table import Floats

RECENT = 20
"""Number of steps averaged for "now" and for "at first"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWarning:
    """Says `what` is wrong in a few words, `why` with its numbers, and a `fix` to try."""

    what: str
    why: str
    fix: str


def warnings_of(run: RunReading) -> list[RunWarning]:
    """Return the warnings in the order in which to look at them."""
    rules = (_ended, _losses, _rewards, _parts, _signal, _drift, _lengths, _waits, _records)
    return [warning for rule in rules for warning in rule(run)]


def _ended(run: RunReading) -> Iterator[RunWarning]:
    if run.state.phase != "done" and not run.is_running:
        yield RunWarning(
            what="the run did not end by itself",
            why=f"its last phase was {run.state.phase!r}, at step {run.state.step} of {run.state.steps_planned}",
            fix=f"penstock doctor {run.folder} diagnoses it; penstock resume resumes from a checkpoint",
        )
    for recovery in run.recoveries[-3:]:
        yield RunWarning(
            what=f"{recovery.worker} was lost and came back",
            why=f"{recovery.cause}; it took {recovery.took_s:.0f} s",
            fix="its log is in the run folder's logs",
        )


def _losses(run: RunReading) -> Iterator[RunWarning]:
    num_trained = len(run.step_of_group)
    num_dropped = sum(run.state.drops.values())
    share = num_dropped / max(1, num_dropped + num_trained)
    if share > 0.05:
        reason, count = run.state.drops.most_common(1)[0]
        yield RunWarning(
            what=f"{share:.0%} of all groups were dropped",
            why=f"{num_dropped} of {num_dropped + num_trained}, most of them ({count}) as {reason}",
            fix="what is dropped often differs from what is kept: compare their lengths and tasks",
        )
    num_failed = sum(run.state.failures.values())
    if num_failed > 0.01 * max(1, run.state.num_samples):
        reason, count = run.state.failures.most_common(1)[0]
        yield RunWarning(
            what=f"{num_failed} episodes failed",
            why=f"most of them ({count}) with {reason}",
            fix="penstock samples shows the message of each",
        )


def _rewards(run: RunReading) -> Iterator[RunWarning]:
    rewards, heldout = run.steps.column("reward"), run.state.heldout
    first, last = _ends(rewards)
    if len(heldout) > 1 and heldout[-1][1] <= heldout[0][1]:
        rises = " while the training reward rose" if last > first + 0.05 else ""
        yield RunWarning(
            what="held-out reward did not improve",
            why=f"{heldout[0][1]:.3f} at step {heldout[0][0]}, {heldout[-1][1]:.3f} at {heldout[-1][0]}{rises}",
            fix="read samples: the tasks may be learned by heart, or the reward gamed",
        )
    if len(rewards) >= 3 * RECENT:
        best = float(np.convolve(rewards, np.ones(RECENT) / RECENT, mode="valid").max())
        if best - last > 0.1 * max(abs(best), 1e-9) and best - last > 0.05:
            yield RunWarning(
                what="the reward has fallen since its best",
                why=f"{best:.3f} over {RECENT} steps at best, {last:.3f} at the end",
                fix="lower trainer.learning_rate; penstock export --step best has the best weights",
            )


def _parts(run: RunReading) -> Iterator[RunWarning]:
    """Warn of a reward function that falls while the whole reward rises."""
    names = [
        name
        for name in run.steps.names
        if name.startswith("reward_") and name not in ("reward_mean", "reward_std")
    ]
    if len(names) < 2:
        return
    rose = _ends(run.steps.column("reward"))
    for name in names:
        first, last = _ends(run.steps.column(name))
        if rose[1] > rose[0] and last < first - 0.1 * max(abs(first), 0.1):
            yield RunWarning(
                what=f"{name} fell while the reward rose",
                why=f"from {first:.3f} to {last:.3f}; the whole reward went from {rose[0]:.3f} to {rose[1]:.3f}",
                fix="one reward is bought with another: read samples, change a weight in reward.functions",
            )


def _signal(run: RunReading) -> Iterator[RunWarning]:
    flat = _ends(run.steps.column("zero_advantage_fraction"))[1]
    if flat > 0.8:
        yield RunWarning(
            what="most groups teach nothing",
            why=f"{flat:.0%} of tokens of the last steps had an advantage of zero",
            fix="the tasks are too easy or too hard: mix them, raise rollout.group_size, use zero_variance",
        )
    if _ends(run.steps.column("grad_norm"))[1] == 0:
        yield RunWarning(
            what="the gradient is zero",
            why="over the last steps",
            fix="see zero_advantage_fraction and masked_fraction",
        )
    skipped = np.nan_to_num(run.steps.column("skipped_updates"))
    if skipped.size and skipped[-1] > 0:
        yield RunWarning(
            what=f"{skipped[-1]:.0f} updates were skipped",
            why="their loss or gradient was not finite",
            fix="lower trainer.learning_rate",
        )
    first, last = _ends(run.steps.column("entropy"))
    if first > 0 and last < 0.1 * first and not _improved(run):
        yield RunWarning(
            what="answers have become alike",
            why=f"entropy went from {first:.3g} to {last:.3g}",
            fix="raise rollout.temperature or algorithm.entropy_coef, lower the learning rate",
        )


def _drift(run: RunReading) -> Iterator[RunWarning]:
    ess = _ends(run.steps.column("ess"))[1]
    if ess < 0.5:
        yield RunWarning(
            what="few tokens carry the gradient",
            why=f"the effective sample size of the last steps is {ess:.2f}",
            fix="lower staleness.max_staleness or trainer.learning_rate",
        )
    gaps = run.steps.column("logprob_gap_mean")
    known = gaps[np.isfinite(gaps)]
    if known.size and known[-RECENT:].mean() > 0.02:
        yield RunWarning(
            what="engine and trainer disagree on the same weights",
            why=f"their logprobs differ by {known[-RECENT:].mean():.3g} on average",
            fix="look at engine.dtype and trainer.dtype, top-k and top-p without recorded masks",
        )
    num_nonfinite = float(np.nansum(run.steps.column("nonfinite_logprobs")))
    if num_nonfinite > 0:
        yield RunWarning(
            what="logprobs were not finite",
            why=f"{num_nonfinite:.0f} of them; their sequences are out of the loss",
            fix="lower trainer.learning_rate, look at number formats",
        )


def _lengths(run: RunReading) -> Iterator[RunWarning]:
    cut = _ends(run.steps.column("truncated_fraction"))[1]
    if cut > 0.1:
        yield RunWarning(
            what=f"{cut:.0%} of answers are cut off",
            why="at rollout.max_new_tokens, over the last steps",
            fix="raise it, or use overlong_filter or overlong_penalty",
        )
    (first, last), rewards = _ends(run.steps.column("answer_tokens_mean")), _ends(run.steps.column("reward"))
    if first > 0 and last > 1.5 * first and rewards[1] < rewards[0] + 0.02:
        yield RunWarning(
            what="answers grow without a better reward",
            why=f"from {first:.0f} to {last:.0f} tokens",
            fix="overlong_penalty",
        )


def _waits(run: RunReading) -> Iterator[RunWarning]:
    for one in run.time_sheet():
        waited = one.sums["waited"]
        if waited > 0.4:
            cause, share = max(one.waits.items(), key=lambda wait: wait[1])
            yield RunWarning(
                what=f"{one.process} had nothing to do for {waited:.0%} of the time",
                why=f"most of it ({share:.0%}): {cause}",
                fix="docs/reading-a-run.md says what to change for each cause",
            )


def _records(run: RunReading) -> Iterator[RunWarning]:
    if run.steps.num_undone:
        yield RunWarning(
            what=f"{run.steps.num_undone} steps were undone and trained again",
            why="a trainer or the run resumed from a checkpoint",
            fix="nothing: each step counts once",
        )
    if run.num_damaged:
        yield RunWarning(
            what=f"{run.num_damaged} event files end in the middle of a record",
            why="the run was killed while it wrote",
            fix="nothing: at most the last half second of that session is missing",
        )


def _improved(run: RunReading) -> bool:
    """Return whether the held-out reward rose, or the training reward of a run that is not evaluated."""
    heldout = run.state.heldout
    if len(heldout) > 1:
        return heldout[-1][1] > heldout[0][1]
    first, last = _ends(run.steps.column("reward"))
    return last > first


def _ends(column: Floats) -> tuple[float, float]:
    """Return the means of the first and of the last known values; NaN if there are none."""
    known = column[np.isfinite(column)]
    if not known.size:
        return float("nan"), float("nan")
    return float(known[:RECENT].mean()), float(known[-RECENT:].mean())
