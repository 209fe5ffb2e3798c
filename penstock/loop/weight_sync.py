"""Brings the trainer's weights to the engines, beside training: one transfer at a time, and the newest waits.

    step 7 ─► 7 is sent ────────────────────► served
    step 8 ─► 8 waits ─► replaced, never sent
    step 9 ────────────► 9 waits ───────────► 9 is sent ─► served

A transfer that fails leaves engines on the version that they have. It is retried, and then the engines that
failed leave the pool. An engine that did not load what was published gets a full update once more, and then
leaves too. When every engine fails so, the run ends.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from penstock.errors import (
    BaseMissing,
    ChannelClosed,
    EngineLost,
    FingerprintMismatch,
    PenstockError,
    SnapshotReplaced,
    TrainerLost,
    UpdateAbandoned,
    UserError,
    WorkerDied,
)
from penstock.loop.activity import Activity
from penstock.loop.edges import Delivered, LoopEvents
from penstock.loop.rollout_buffer import RolloutBuffer
from penstock.records import Interrupt, UpdateReceipt
from penstock.records.interfaces import Engine, Trainer

FINAL = (ChannelClosed, SnapshotReplaced, UserError, WorkerDied)
"""Errors after which another attempt would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Describes a version that can be published."""

    version: int
    made_s: float
    """When its weights were computed."""
    snapshot_s: float = 0.0
    """How long the trainer took to copy them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Says how often a failed transfer is retried, and after how long; each wait is twice the last."""

    count: int = 3
    first_s: float = 1.0


@dataclass(slots=True, kw_only=True)
class _Transfer:
    """Remembers how often a version was tried, and how it is tried next."""

    offer: Offer
    full: bool = False
    num_failed: int = 0
    """In a row, without those that a full update mends."""
    differs: bool = False
    """Whether an engine did not load what was published last."""
    lacks_base: bool = False
    is_mended: bool = False
    """Whether a full update was sent because an engine lacked the base."""


class SyncedEngines(Engine, Protocol):
    """Takes updates for all engines of a run (`penstock.engines.engine_pool.EnginePool`)."""

    async def expel_failed(self, kind: type[BaseException]) -> dict[str, int]:
        """Remove the engines that failed the last update with this kind of error from the pool. Returns how many
        requests each had; if all engines failed, they stay and the result is empty."""

    async def mend(self, bring: Callable[[Engine], Awaitable[None]]) -> None:
        """Call `bring` for each engine that lacked the weights below its adapter at the last update."""


class WeightSync:
    """Delivers versions to the engines. The controller starts `run` as a background task, offers versions, and
    calls `finish` after the last."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        engines: SyncedEngines,
        buffer: RolloutBuffer,
        events: LoopEvents,
        activity: Activity,
        interrupt: Interrupt = "inflight",
        retries: Retries | None = None,
    ) -> None:
        self._trainer = trainer
        self._engines = engines
        self._buffer = buffer
        self._events = events
        self._activity = activity
        self._interrupt: Interrupt = interrupt
        self._retries = retries or Retries()
        self._below: int | None = None
        """The version of the weights below the adapter that was published last."""
        self._waiting: Offer | None = None
        self._is_finished = self._is_renewing = self._is_running = self._is_paused = False
        self._sending: asyncio.Future[None] | None = None
        self._changed = asyncio.Event()
        self._unreleased: set[int] = set()
        """Versions whose snapshots the trainer may still hold."""
        self._num_skipped = 0
        """Versions that were never sent, since the last that was."""

    def issue(self, step: int) -> int:
        """Issue a version for the weights that `step` makes."""
        version = self._buffer.issue(step)
        self._unreleased.add(version)
        return version

    def withdraw(self, version: int) -> None:
        """Note that no weights were made for the version."""
        self._buffer.gate.history.withdraw(version)
        self._unreleased.discard(version)

    async def offer(self, offer: Offer) -> None:
        """Send this version when nothing else is being sent. It replaces one that waits."""
        replaced, self._waiting = self._waiting, offer
        self._changed.set()
        if replaced is not None:
            await self._skip(replaced.version)

    def engine_lost(self, name: str, error: EngineLost) -> None:
        """Send the weights again to a pool that lost an engine, unless newer ones are on their way."""
        self._events.log(f"{name} is lost, its requests begin again elsewhere or wait for it: {error}")
        self._is_renewing = True
        self._changed.set()

    def finish(self) -> None:
        """Let `run` end once all offers are served."""
        self._is_finished = True
        self._changed.set()

    async def run(self) -> None:
        """Send what is offered; after `finish`, return once all is sent."""
        self._is_running = True
        try:
            while await self._has_more():
                with contextlib.suppress(TrainerLost):  # what it offered is void; `pause` follows
                    await self._send_next()
        finally:
            self._is_running = False

    async def _has_more(self) -> bool:
        """Wait for something to send; return False when nothing more will come."""
        while self._is_paused or (self._waiting is None and not self._is_renewing):
            if self._is_finished and not self._is_paused:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    async def _send_next(self) -> None:
        if self._waiting is None:
            await self._offer_again()
            return
        offer, self._waiting = self._waiting, None
        sending = self._sending = asyncio.ensure_future(self.deliver(offer))
        try:
            await asyncio.wait({sending})
            if not sending.cancelled():
                sending.result()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def pause(self) -> None:
        """Send nothing before `resume`: the trainer is lost, and what it has published is void."""
        self._is_paused, self._is_renewing, self._waiting = True, False, None
        self._unreleased.clear()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    def resume(self) -> None:
        """Continue to send, since another trainer has started."""
        self._is_paused = False
        self._changed.set()

    async def _offer_again(self) -> None:
        """Offer the weights of the last step under a new number, unless a step is being made, whose weights come
        soon."""
        self._is_renewing = False
        history, step = self._buffer.gate.history, self._buffer.gate.step
        if history.step_of(history.newest) > step:
            return
        version = self.issue(step)
        await self._trainer.snapshot(version)
        await self.offer(Offer(version=version, made_s=self._events.now()))

    async def serve(self, offer: Offer) -> None:
        """Offer the version while `run` runs; deliver it at once before and after."""
        if self._is_running:
            await self.offer(offer)
        else:
            await self.deliver(offer)

    async def send_again(self, version: int, engine: Engine) -> None:
        """Bring one engine to a version that the others already had."""
        await self._trainer.snapshot(version)
        try:
            update = await self._trainer.publish(version)
            taking = engine.update(update)
            if update.sends:
                await send_and_take(self._trainer.send(version), taking)
            else:
                await taking
        finally:
            await self._trainer.release(version)

    async def deliver(self, offer: Offer) -> None:
        """Bring every engine that stays in the pool to a version, however often that must be tried. A version
        whose snapshot the trainer has replaced is skipped."""
        version = offer.version
        self._activity.syncing_version = version
        transfer = _Transfer(offer=offer)
        delivered = None
        try:
            while delivered is None:
                try:
                    if transfer.lacks_base:
                        transfer.lacks_base = False
                        await self._bring_below()
                    delivered = await self._attempt(offer, full=transfer.full)
                except FINAL:
                    raise
                except PenstockError as error:
                    await self._recover(transfer, error)
        except SnapshotReplaced:  # the trainer is faster than this: the version after it comes soon
            await self._skip(version)
            return
        finally:
            self._activity.syncing_version = None
        self._events.updated(delivered)
        self._num_skipped = 0
        self._buffer.served(version)
        await self._trainer.release(version)
        self._unreleased.discard(version)

    async def abandon(self) -> None:
        """Release every version that the trainer may still hold: no engine will read it, and a trainer that
        waits for a free slot continues."""
        for version in sorted(self._unreleased):
            with contextlib.suppress(PenstockError):  # it has no snapshot yet
                await self._trainer.release(version, delivered=False)

    async def _skip(self, version: int) -> None:
        self._num_skipped += 1
        self._unreleased.discard(version)
        await self._trainer.release(version, delivered=False)

    async def _recover(self, transfer: "_Transfer", error: PenstockError) -> None:
        """Prepare another attempt: in full, after a wait, or without the engines that failed."""
        version = transfer.offer.version
        if isinstance(error, FingerprintMismatch):  # damage, or another model
            transfer.full = True
            if transfer.differs:
                await self._expel(version, 2, error, FingerprintMismatch)
            else:
                self._events.log(
                    f"version {version} is sent again in full, since an engine did not load what was "
                    f"published: {_briefly(error)}"
                )
            transfer.differs = not transfer.differs
            return
        if isinstance(error, BaseMissing):  # an engine is new, or lost what it had
            transfer.lacks_base = True
            if not transfer.is_mended:
                transfer.full = transfer.is_mended = True
                return
        transfer.num_failed += 1
        if transfer.num_failed <= self._retries.count:
            wait_s = self._retries.first_s * 2 ** (transfer.num_failed - 1)
            self._events.log(
                f"version {version} did not reach every engine, trying again in {wait_s:g} s: {error}"
            )
            await asyncio.sleep(wait_s)
            return
        await self._expel(version, transfer.num_failed, error)
        transfer.num_failed = 0

    async def _bring_below(self) -> None:
        """Bring the weights below the adapter to engines that lack them. Full updates build on nothing."""
        if self._below is not None:
            await self._engines.mend(partial(self.send_again, self._below))

    async def _expel(
        self,
        version: int,
        num_failed: int,
        failure: PenstockError,
        kind: type[BaseException] = BaseException,
    ) -> None:
        """Remove the engines that failed with this kind of error. Without any other engine the run ends."""
        expelled = await self._engines.expel_failed(kind)
        if not expelled:
            if isinstance(failure, FingerprintMismatch):
                raise failure
            raise PenstockError(
                f"version {version} could not be brought to the engines in {num_failed} attempts, and no other "
                f"engine is left: {failure}"
            ) from failure
        for name, num_requests in expelled.items():
            self._events.log(
                f"{name} leaves the run: it could not be brought to version {version} in {num_failed} attempts "
                f"({_briefly(failure)}); others continue with its {num_requests} requests"
            )

    async def _attempt(self, offer: Offer, *, full: bool) -> Delivered:
        """Publish once, and let every engine take it. Where the trainer sends, it does so while engines take."""
        version, measure = offer.version, self._events.measure
        started = self._events.now()
        with measure("sync", "publish", version=version):
            update = await self._trainer.publish(version, full=full)
        self._below = update.base if update.selection == "adapter" else None
        publish_s = self._events.now() - started
        with measure("sync", "update", version=version):
            taking = self._engines.update(update, self._interrupt)
            if update.sends:
                receipt = await send_and_take(self._trainer.send(version), taking)
            else:
                receipt = await taking
        return Delivered(
            receipt=receipt,
            snapshot_s=offer.snapshot_s,
            publish_s=publish_s,
            fresh_s=self._events.now() - offer.made_s,
            num_bytes=update.num_bytes,
            num_skipped=self._num_skipped,
        )


def _briefly(failure: PenstockError) -> str:
    """Shorten an error message. That of a mismatch also explains what to do in a run without another engine."""
    return str(failure).partition("; ")[0] if isinstance(failure, FingerprintMismatch) else str(failure)


ANSWER_GRACE_S = 1.0
"""How long a failed sender waits for the engines' answers: one that died says more than a closed connection."""


async def send_and_take(
    send: Coroutine[Any, Any, None], take: Coroutine[Any, Any, UpdateReceipt]
) -> UpdateReceipt:
    """Run both sides until both succeed, or cancel the other when one fails. Raises the error of the side that
    failed, not that of the cancelled one."""
    sending, taking = asyncio.ensure_future(send), asyncio.ensure_future(take)
    both = (taking, sending)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if not taking.done():
            await asyncio.wait([taking], timeout=ANSWER_GRACE_S)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
    errors = [error for task in both if not task.cancelled() and (error := task.exception()) is not None]
    for error in [one for one in errors if not isinstance(one, UpdateAbandoned)] or errors:
        raise error
    return taking.result()
