"""From a journal and a checkpoint to where a controller goes on.

Groups that were finished go back to the buffer, not to the engines; those that undone steps had trained are first.
Groups that were running are generated on under their old numbers, and their finished episodes are kept.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.blobs.verification import refs_of_episode
from penstock.buffer.admission import EMPTY, ReadyGroup, masked_before, of_policy, oldest_step
from penstock.buffer.durable_log import FOLDER, DurableGroupLog, read_lives
from penstock.buffer.history import HistoryState, VersionHistory
from penstock.buffer.journal.journal_files import DiskFiles
from penstock.buffer.life_records import Standing, samples_of
from penstock.buffer.lives import UNDER_WAY, Life
from penstock.errors import BlobLost
from penstock.orchestration.checkpoints import Progress
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.group_production import LOST_BLOB
from penstock.orchestration.resume import BroughtBack, LostGroup, Resume
from penstock.tasks.stream import TaskStream
from penstock.types import Episode, PartialGroup, blobs_of


def put_aside_other_history(folder: Path, step: int | None) -> Path | None:
    """Rename a journal that does not reach `step`, since the run went on without it, or that has let go of groups
    which a run needs that goes on from there. None renames any. Returns what it is called now."""
    if not folder.exists():
        return None
    if step is not None:
        standing = read_lives(DiskFiles(folder), keeps_content=False).standing
        if standing.covered <= step <= standing.step:
            return None
    names = (folder.with_name(f"{folder.name}.undone-{number}") for number in itertools.count(1))
    return folder.rename(next(name for name in names if not name.exists()))


async def recover(
    log: DurableGroupLog, progress: Progress, config: PenstockConfig, tasks: TaskStream
) -> Resume:
    """Where the run goes on, with `tasks` at their place. The journal is told first that it does."""
    tasks.restore(progress.tasks)
    plain = progress.resume(config)
    if not log.lives.standing.version_steps:
        await log.resumed(progress.step, _standing(progress, tasks))
        return plain
    await log.resumed(progress.step)
    standing, lives = log.lives.standing, log.lives.by_number.values()
    tasks.move_to(standing.num_taken, standing.returned)
    history = VersionHistory(progress.history.policy, standing.version_steps)
    finished = [life for life in lives if life.state == "scored"]
    back = await _bring_back(finished, log, history, config, tasks)
    running = [life for life in lives if life.state in UNDER_WAY]
    outstanding = [*running, *(log.lives.by_number[group.ticket.number] for group in back.ready)]
    episodes = {life.ticket.number: _episodes(life, log) for life in running}
    resume = Resume(
        gate=msgspec.structs.replace(
            plain.gate,
            num_admitted=standing.num_admitted,
            ready=tuple(back.ready),
            running=tuple(life.ticket for life in running),
        ),
        history=HistoryState(policy=history.policy, steps=standing.version_steps),
        running={life.ticket.number: tasks.task(life.task_id) for life in outstanding},
        episodes=episodes,
        partial={life.ticket.number: _partial(life, episodes[life.ticket.number], log) for life in running},
        lost=back.lost,
    )
    log.lives.let_go()
    return resume


@dataclass(frozen=True, slots=True)
class UndoneGroups:
    """Reads from the journal of a run which groups were trained by steps that are undone."""

    log: DurableGroupLog
    run: Path
    config: PenstockConfig
    tasks: TaskStream

    async def after(self, step: int) -> BroughtBack:
        """The groups that steps after `step` have trained on: a trainer has gone back to `step`, and the journal is
        told first."""
        await self.log.durable()
        lives = await asyncio.to_thread(read_lives, DiskFiles(self.run / FOLDER))
        await self.log.resumed(step)
        history = VersionHistory(steps=lives.standing.version_steps)
        undone = [
            life
            for life in lives.by_number.values()
            if life.state == "trained" and life.step is not None and life.step > step
        ]
        return await _bring_back(undone, self.log, history, self.config, self.tasks)


async def _bring_back(
    lives: Iterable[Life],
    log: DurableGroupLog,
    history: VersionHistory,
    config: PenstockConfig,
    tasks: TaskStream,
) -> BroughtBack:
    """Finished groups, with their blobs. One without a token to train on was about to be dropped when the run
    ended; one whose blobs are gone is lost."""
    ready, lost = list[ReadyGroup](), list[LostGroup]()
    for life in lives:
        group = _ready(life, history, config, tasks)
        try:
            if group is not None:
                log.bring_back_blobs(group.scored.group)
                ready.append(group)
                continue
            reason, message = EMPTY, "it has no token to train on"
        except BlobLost as error:
            reason, message = LOST_BLOB, str(error)
        assert life.scored is not None
        scored = life.scored.with_task(tasks.task(life.task_id))
        lost.append(LostGroup(group=scored.group, scores=scored.scores, reason=reason, message=message))
        await log.dropped(life.ticket.number, reason)
    return BroughtBack(ready=ready, lost=lost)


def _ready(
    life: Life, history: VersionHistory, config: PenstockConfig, tasks: TaskStream
) -> ReadyGroup | None:
    """As the buffer had it; None without a token to train on."""
    assert life.scored is not None, "a group that may be trained keeps what it consists of"
    scored = life.scored.with_task(tasks.task(life.task_id))
    samples = of_policy(history.policy, samples_of(life.scored, scored))
    oldest = oldest_step(samples, history)
    if oldest is None:
        return None
    if life.selected_at is not None and config.staleness.late == "mask":
        then = VersionHistory(history.policy, life.steps_at_selection)
        samples = masked_before(life.selected_at - life.ticket.bound, samples, then)
    return ReadyGroup(
        ticket=life.ticket,
        scored=scored,
        samples=samples,
        oldest_step=oldest,
        selected_at=life.selected_at,
        steps_at_selection=life.steps_at_selection,
    )


def _episodes(life: Life, log: DurableGroupLog) -> dict[int, Episode]:
    """Those that had ended and of which nothing is lost."""
    kept = {}
    for index, episode in life.episodes.items():
        with contextlib.suppress(BlobLost):
            log.bring_back_partial(life.ticket.number, refs_of_episode(episode))
            kept[index] = episode
    return kept


def _partial(life: Life, ended: Mapping[int, Episode], log: DurableGroupLog) -> PartialGroup:
    """What else the group had done, up to where something is lost."""
    partial = life.partial
    partial.scores = {index: score for index, score in partial.scores.items() if index in ended}
    for part in [part for parts in partial.turns.values() for part in parts]:
        try:
            log.bring_back_partial(life.ticket.number, blobs_of([part]))
        except BlobLost:
            partial.cut(part)
    return partial


def _standing(progress: Progress, tasks: TaskStream) -> Standing:
    return Standing(
        num_admitted=progress.num_admitted,
        num_taken=tasks.num_taken,
        returned=progress.tasks.returned,
        version_steps=progress.history.steps,
        step=progress.step,
    )
