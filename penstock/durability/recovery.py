"""Recovers a controller's state from a journal and a checkpoint.

Finished groups go back to the buffer, not to the engines; those that undone steps had trained come first.
Groups that were running continue under their old numbers, and keep their finished episodes.
"""

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.config.root import PenstockConfig
from penstock.durability.checkpoints import Progress
from penstock.durability.durable_log import FOLDER, DurableGroupLog, read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from penstock.errors import BlobLost
from penstock.loop.admission import EMPTY, ReadyGroup, masked_before, of_policy, oldest_step
from penstock.loop.attempt_records import RunResumed, Standing, samples_of
from penstock.loop.attempts import Attempt, AttemptState
from penstock.loop.group_production import LOST_BLOB
from penstock.loop.history import VersionHistory
from penstock.loop.resume import BroughtBack, LostGroup, Resume
from penstock.records import DEFAULT_POLICY, PartialGroup, blobs_of
from penstock.records.blob_refs import refs_of_episode
from penstock.tasks.stream import TaskStream


def put_aside_other_history(folder: Path, step: int | None) -> str | None:
    """Rename a journal that does not fit a run that resumes from `step`, and say why in a sentence.

    Either it does not reach `step`, since the run continued without it or its end was lost, or it has removed
    groups that are needed there. With `step` None, any journal is renamed.
    """
    if not folder.exists():
        return None
    why = "the run keeps no journal now"
    if step is not None:
        standing = read_attempts(DiskFiles(folder), keeps_content=False).standing
        if standing.covered <= step <= standing.step:
            return None
        why = f"the journal has no groups from before step {standing.covered}, and the checkpoint is of step {step}"
        if standing.step < step:
            why = (
                f"the journal ends at step {standing.step} and the checkpoint is of step {step}: its end was lost, "
                "or the run continued without it"
            )
    names = (folder.with_name(f"{folder.name}.undone-{number}") for number in itertools.count(1))
    aside = folder.rename(next(name for name in names if not name.exists()))
    return f"{why}. Groups under way are generated again; the journal is now {aside.name}"


async def recover(
    log: DurableGroupLog, progress: Progress, config: PenstockConfig, tasks: TaskStream
) -> Resume:
    """Return the state to resume from, and move `tasks` to their position. The journal first records that the
    run resumes."""
    tasks.restore(progress.tasks)
    plain = progress.resume(config)
    attempts = log.attempts
    if not attempts.standing.version_steps:
        await log.append(RunResumed(step=progress.step, standing=_standing(progress, tasks)))
        return plain
    await log.append(RunResumed(step=progress.step, num_again=attempts.num_again(progress.step)))
    standing = attempts.standing
    tasks.move_to(standing.num_taken, standing.returned)
    history = _history(progress.history.policy, standing)
    finished = [one for one in attempts.by_number.values() if one.state == AttemptState.SCORED]
    back = _bring_back(finished, log, history, config, tasks)
    running = attempts.under_way
    outstanding = [*running, *(group.ticket.number for group in back.ready)]
    resume = Resume(
        gate=msgspec.structs.replace(
            plain.gate,
            num_admitted=standing.num_admitted,
            ready=tuple(back.ready),
            running=tuple(one.ticket for one in running.values()),
        ),
        history=history.state(),
        task_ids={number: attempts.by_number[number].task_id for number in outstanding},
        partial={number: _partial(one, log) for number, one in running.items()},
        lost=back.lost,
    )
    attempts.forget_contents()
    return resume


@dataclass(frozen=True, slots=True)
class UndoneGroups:
    """Reads the groups of undone steps from the run's journal."""

    log: DurableGroupLog
    run: Path
    config: PenstockConfig
    tasks: TaskStream

    async def after(self, step: int) -> BroughtBack:
        """Record the rollback to `step` in the journal, and return the groups that later steps had trained."""
        await self.log.durable()
        attempts = await asyncio.to_thread(read_attempts, DiskFiles(self.run / FOLDER))
        await self.log.append(RunResumed(step=step, num_again=self.log.attempts.num_again(step)))
        history = _history(DEFAULT_POLICY, attempts.standing)
        return _bring_back(attempts.trained_after(step), self.log, history, self.config, self.tasks)


def _history(policy: str, standing: Standing) -> VersionHistory:
    return VersionHistory(policy, standing.version_steps.get(policy, ()))


def _bring_back(
    attempts: Iterable[Attempt],
    log: DurableGroupLog,
    history: VersionHistory,
    config: PenstockConfig,
    tasks: TaskStream,
) -> BroughtBack:
    """Make finished groups ready again, with their blobs in the store of this run.

    A group without a token to train on was about to be dropped when the run ended; one whose blobs are gone
    is lost.
    """
    ready, lost = list[ReadyGroup](), list[LostGroup]()
    for attempt in attempts:
        group = _ready(attempt, history, config, tasks)
        try:
            if group is not None:
                if log.copies is not None:
                    log.copies.bring_back(group.scored.group)
                ready.append(group)
                continue
            reason, message = EMPTY, "it has no token to train on"
        except BlobLost as error:
            reason, message = LOST_BLOB, str(error)
        assert attempt.scored is not None
        scored = attempt.scored.with_task(tasks.task(attempt.task_id))
        lost.append(LostGroup(group=scored.group, scores=scored.scores, reason=reason, message=message))
    return BroughtBack(ready=ready, lost=lost)


def _ready(
    attempt: Attempt, history: VersionHistory, config: PenstockConfig, tasks: TaskStream
) -> ReadyGroup | None:
    """Return the group as the buffer had it; None without a token to train on."""
    assert attempt.scored is not None, "a group that may be trained keeps what it consists of"
    scored = attempt.scored.with_task(tasks.task(attempt.task_id))
    samples = of_policy(history.policy, samples_of(attempt.scored, scored))
    oldest = oldest_step(samples, history)
    if oldest is None:
        return None
    steps = attempt.steps_at_selection.get(history.policy, ())
    if attempt.selected_at is not None and config.staleness.late == "mask":
        then = VersionHistory(history.policy, steps)
        samples = masked_before(attempt.selected_at - attempt.ticket.bound, samples, then)
    return ReadyGroup(
        ticket=attempt.ticket,
        scored=scored,
        samples=samples,
        oldest_step=oldest,
        selected_at=attempt.selected_at,
        steps_at_selection=steps,
    )


def _partial(attempt: Attempt, log: DurableGroupLog) -> PartialGroup:
    """Return what the group had done: episodes that are complete, and turns up to the first lost blob."""
    partial, copies, number = attempt.partial or PartialGroup(), log.copies, attempt.ticket.number
    if copies is not None:
        for index, episode in list(partial.episodes.items()):
            try:
                copies.bring_back_partial(number, refs_of_episode(episode))
            except BlobLost:
                del partial.episodes[index]
        for part in [part for parts in partial.turns.values() for part in parts]:
            try:
                copies.bring_back_partial(number, blobs_of([part]))
            except BlobLost:
                partial.cut(part)
    partial.scores = {index: score for index, score in partial.scores.items() if index in partial.episodes}
    return partial


def _standing(progress: Progress, tasks: TaskStream) -> Standing:
    return Standing(
        num_admitted=progress.num_admitted,
        num_taken=tasks.num_taken,
        returned=progress.tasks.returned,
        version_steps={progress.history.policy: progress.history.steps},
        step=progress.step,
    )
