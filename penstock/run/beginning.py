"""Prepares the start of a run, or its resumption: the journal, the position in the tasks, and the work still to
do."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import msgspec

from penstock.config.root import RunConfig
from penstock.durability.checkpoints import Part
from penstock.durability.durable_log import FOLDER, DurableGroupLog, open_log
from penstock.durability.recovery import put_aside_other_history, recover
from penstock.loop.resume import Resume
from penstock.records.interfaces import BlobStore
from penstock.run.preflight import Prepared
from penstock.tasks.curriculum import load_curriculum
from penstock.tasks.stream import TaskStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Holds what a run starts its workers and its controller with."""

    prepared: Prepared
    """With a journal, the history of a saved run has every version issued, also those after its checkpoint."""
    tasks: TaskStream
    resume: Resume | None = None
    log: DurableGroupLog | None = None
    """None: the run has no journal."""


@asynccontextmanager
async def begin(prepared: Prepared, blobs: BlobStore, say: Callable[[str], None]) -> AsyncIterator[Beginning]:
    """Open the journal and recover from it. Without checkpoints there is nothing to resume from, so there is no
    journal either."""
    config, saved = prepared.config, prepared.saved
    tasks = TaskStream(
        prepared.tasks,
        seed=config.run.seed,
        shuffle=config.tasks.shuffle,
        curriculum=load_curriculum(config.tasks.curriculum, prepared.tasks),
    )
    has_journal = config.run.journal and config.run.checkpoint_every > 0 and not config.run.deterministic
    reached = None if saved is None or not has_journal else saved.progress.step
    if (why := put_aside_other_history(prepared.folder / FOLDER, reached)) is not None:
        say(why)
    if not has_journal:
        if saved is not None:
            tasks.restore(saved.progress.tasks)
        resume = None if saved is None else saved.progress.resume(config)
        yield Beginning(prepared=prepared, tasks=tasks, resume=resume)
        return
    opened = open_log(
        prepared.folder / FOLDER,
        blobs=blobs,
        say=say,
        progress_s=config.run.journal_every_s,
    )
    async with opened as log:
        if saved is None:
            yield Beginning(prepared=prepared, tasks=tasks, log=log)
            return
        resume = await recover(log, saved.progress, config, tasks)
        say(describe(resume))
        progress = msgspec.structs.replace(saved.progress, history=resume.history)
        going_on = replace(prepared, saved=replace(saved, progress=progress))
        yield Beginning(prepared=going_on, tasks=tasks, resume=resume, log=log)


def what_a_crash_costs(run: RunConfig, only_in_python: Sequence[Part]) -> str | None:
    """Return a sentence on what a crash would cost, for a run that `penstock resume` could not resume; else
    None."""
    if only_in_python:
        parts = " and ".join(only_in_python)
        return (
            f"`penstock resume` can't resume this run after a crash: it was given its {parts} as a Python "
            "object; name it by a file or an import path (reward.functions, rollout.workflow, tasks.source)"
        )
    if run.checkpoint_every == 0:
        return (
            "a crash would cost all of this run: it keeps no checkpoints and no journal (run.checkpoint_every=0); "
            "with run.checkpoint_every=50 `penstock resume` works"
        )
    return None


def describe(resume: Resume) -> str:
    """Describe in a sentence what was saved of the work after the checkpoint."""
    gate = resume.gate
    episodes = sum(len(group.episodes) for group in resume.partial.values())
    tokens = sum(group.num_tokens for group in resume.partial.values())
    return (
        f"resuming after step {gate.step} with {len(gate.ready)} finished groups from the journal; "
        f"{len(gate.running)} groups were under way, {episodes} of their episodes finished, and {tokens} tokens of "
        "the others are kept"
    )
