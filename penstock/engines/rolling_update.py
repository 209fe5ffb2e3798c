"""Updates several engines a share at a time, so that generation as a whole never stops.

    engine a   ── generates, stages ── load ── generates ─────────────────
    engine b   ── generates, stages ── load ── generates ─────────────────
    engine c   ── generates, stages ────────── load ── generates ─────────
    engine d   ── generates, stages ────────── load ── generates ─────────

All engines stage at once, as they must where the trainer broadcasts. Then a share of them loads at a time: when
one has loaded, the next begins. Updates that can be read in place are staged by the engines that staged the last
one, because they have memory for a copy. The others read them when their turn comes: they would answer a call to
stage only between two forward passes, and admission would wait for the slowest.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import msgspec

from penstock.records import Interrupt, UpdateReceipt, WeightUpdate
from penstock.records.interfaces import Engine

Answer = UpdateReceipt | BaseException


@dataclass(slots=True, eq=False)
class Member:
    """Tracks an engine of the pool, its number of requests, and what it last acknowledged for each policy."""

    name: str
    engine: Engine
    load: int = 0
    acknowledged: dict[str, UpdateReceipt] = field(default_factory=dict)
    failure: BaseException | None = None
    """Why it did not take the last update. Engines that were only cancelled because another failed have none."""
    is_draining: bool = False
    """It finishes its answers and starts none. Others take new requests meanwhile."""
    is_leaving: bool = False
    """It gets no further requests, and leaves when it has finished those that it has."""
    is_expelled: bool = False
    """Other engines continue its requests."""
    is_lost: bool = False
    """It has no weights, because it has lost its server or has just joined. It takes requests again after the
    next update; other engines continue those that it had."""

    def has(self, update: WeightUpdate) -> bool:
        receipt = self.acknowledged.get(update.policy)
        return receipt is not None and receipt.version == update.version

    def stages(self, update: WeightUpdate) -> bool:
        """Return whether it has something to do when it stages this: of full weights that can be read in place,
        the last receipt says so."""
        receipt = self.acknowledged.get(update.policy)
        staged_last = receipt is not None and receipt.stage_s > 0 and update.selection == "full"
        return staged_last or not update.is_read_in_place


def num_at_once(num_serving: int, share: float) -> int:
    """Return how many engines load at once: at least one, and never all that serve, unless there is just one."""
    return max(1, min(math.ceil(share * num_serving), num_serving - 1))


async def roll(
    members: Sequence[Member], update: WeightUpdate, interrupt: Interrupt, *, at_once: int
) -> list[Answer]:
    """Update the engines and return the receipt or error of each. `at_once` of them load at a time; those that
    serve nothing yet need not wait for a turn. When one can't stage an update that is sent to all at once, the
    others are cancelled and none loads it."""
    if update.sends:
        update = msgspec.structs.replace(update, receivers=len(members))
    failures: list[BaseException | None] = [None] * len(members)
    if update.sends or len(members) > 1:
        staging = [at for at, member in enumerate(members) if member.stages(update)]
        for at, failure in zip(
            staging, await stage_all([members[at] for at in staging], update), strict=True
        ):
            failures[at] = failure
    if update.sends and any(failures):
        return [failure or asyncio.CancelledError() for failure in failures]
    turns = asyncio.Semaphore(at_once)

    async def load(member: Member, failure: BaseException | None) -> Answer:
        if failure is not None:
            return failure
        async with nullcontext() if member.is_lost else turns:
            member.acknowledged.pop(update.policy, None)
            member.is_draining = interrupt == "drain"
            try:
                receipt = await member.engine.update(update, interrupt)
            except Exception as error:
                return error
            finally:
                member.is_draining = False
            member.acknowledged[update.policy] = receipt
            member.is_lost = False
            return receipt

    async with asyncio.TaskGroup() as loading:
        tasks = [loading.create_task(load(*each)) for each in zip(members, failures, strict=True)]
    return [task.result() for task in tasks]


async def stage_all(members: Sequence[Member], update: WeightUpdate) -> list[BaseException | None]:
    """Stage on all engines at once, and return for each its error or None. The first failure of a broadcast cancels
    the others."""
    if not members:
        return []
    tasks = [asyncio.ensure_future(member.engine.stage(update)) for member in members]
    try:
        await asyncio.wait(
            tasks, return_when=asyncio.FIRST_EXCEPTION if update.sends else asyncio.ALL_COMPLETED
        )
    finally:
        for task in tasks:
            task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


def slowest(receipts: Sequence[UpdateReceipt]) -> UpdateReceipt:
    """Return one receipt for all engines, with the longest times and the sums of tokens."""
    times = ("stage_s", "stall_s", "verify_s", "drain_s")
    tokens = ("recomputed_tokens", "discarded_tokens")
    return msgspec.structs.replace(
        receipts[0],
        **{name: max(getattr(receipt, name) for receipt in receipts) for name in times},
        **{name: sum(getattr(receipt, name) for receipt in receipts) for name in tokens},
    )
