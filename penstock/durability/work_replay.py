"""Puts the journal between episodes and engines, so that turns and calls under way survive the controller."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.durability.durable_log import DurableGroupLog
from penstock.loop.resume import Resume
from penstock.records import ONE_VERSION, CallAnswer, Interrupt, WorkProgressed
from penstock.records.interfaces import Engine
from penstock.rollout.episode_rollout import TokenSource
from penstock.rollout.replayed_calls import KeepCall, keep_nothing
from penstock.rollout.replayed_turns import ReplayedTurns

RECORD_EVERY = 256
"""Tokens between two pieces of recorded data that are kept while an answer is in progress: each piece is a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkReplay:
    """Holds what episodes use: engines, and where the answers of their calls are recorded."""

    engine: TokenSource
    keep_call: KeepCall = keep_nothing


def keep_work(
    engine: Engine,
    log: DurableGroupLog | None,
    resume: Resume | None,
    *,
    interrupt: Interrupt,
    records_routing: bool,
    say: Callable[[str], None],
) -> WorkReplay:
    """Return the engines and call keeper of episodes, which record turns and calls in the journal if there is
    one."""
    if log is None:
        return WorkReplay(engine=engine)
    turns = ReplayedTurns(
        engine,
        log,
        known=resume.partial if resume is not None else None,
        resumes=interrupt not in ONE_VERSION,
        records_routing=records_routing,
        record_every=RECORD_EVERY,
        say=say,
    )

    async def keep_call(answer: CallAnswer) -> None:
        await log.append(WorkProgressed(calls=(answer,)))

    return WorkReplay(engine=turns, keep_call=keep_call)
