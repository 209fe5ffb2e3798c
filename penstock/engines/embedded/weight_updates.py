"""Takes new weights into an engine, full ones and adapters: staged beside generation, loaded between two passes.

    full      stage ─► load into the live weights, verify                     one pass waits for the copy
    adapter   stage ─► fill an idle slot, verify ─► the policy moves there    one pass waits for the move

A policy is served with the full weights, or with these and its adapter once it has one. New full weights
remove all adapters, since those were trained on others.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from penstock.engines.embedded.adapters.adapter_serving import AdapterServing, Place
from penstock.engines.embedded.adapters.policy_adapters import PolicyAdapters
from penstock.engines.embedded.interrupts import INTERRUPTS, Cost, Drain, Interrupts
from penstock.engines.embedded.outbox import Outbox
from penstock.engines.embedded.scheduler import Scheduler
from penstock.engines.embedded.staged_updates import StagedUpdates
from penstock.engines.embedded.stepper import Stepper, Swapped
from penstock.engines.engine_checks import check_update
from penstock.errors import EngineLost, PenstockError
from penstock.records import Interrupt, UpdateReceipt, WeightUpdate
from penstock.records.interfaces import Staged, Verification, WeightReceiver


@dataclass(slots=True)
class Health:
    """Says whether an engine serves. A failure ends when a full update succeeds."""

    name: str
    is_closed: bool = False
    failure: BaseException | None = None
    is_half_updated: bool = False
    """An update failed halfway: the weights are of no version, and the engine waits for a full update."""

    def check(self) -> None:
        if self.is_closed:
            raise PenstockError(f"{self.name} is closed")
        if self.failure is not None:
            raise self.refusal() from self.failure

    def refusal(self) -> PenstockError:
        """Return the error that requests end with. If the engine only waits for weights it is `EngineLost`, so a
        pool may start them again on another engine."""
        kind = EngineLost if self.is_half_updated else PenstockError
        return kind(f"{self.name} has failed: {self.failure}")


class WeightUpdates:
    """Takes updates one after another, and keeps `versions`, the version of every policy that is served."""

    def __init__(
        self,
        health: Health,
        versions: dict[str, int],
        tensors: dict[str, torch.Tensor],
        receiver: WeightReceiver,
        adapters: PolicyAdapters,
        *,
        scheduler: Scheduler,
        stepper: Stepper,
        outbox: Outbox,
        interrupts: Interrupts,
    ) -> None:
        """`versions` are those of the loaded full weights, which were published for the first policy."""
        self._health = health
        self.versions = versions
        self._base = next(iter(versions.values()))
        """The version under which the full weights arrived."""
        self._tensors = tensors
        self._receiver = receiver
        self._staged = StagedUpdates(receiver)
        self._adapters = adapters
        self._scheduler = scheduler
        self._stepper = stepper
        self._outbox = outbox
        self._interrupts = interrupts
        self._lock = asyncio.Lock()
        self._abandoned: set[asyncio.Future[float]] = set()
        """Threads that load an adapter whose update was cancelled; each still holds a slot."""

    async def take(self, update: WeightUpdate, interrupt: Interrupt) -> UpdateReceipt:
        async with self._lock:
            self._check(update, interrupt)
            if update.selection == "adapter":
                return await self._take_adapter(update, interrupt)
            self._check_alone(update)
            fetched = await self._staged.fetch(update)
            staged = fetched.staged
            try:
                with self._interrupts.holding(interrupt, tuple(self.versions)) as drain:
                    await drain.wait()
                    self._take_off_adapters(update)
                    swapped, cost = self._swap(
                        update,
                        partial(self._receiver.load, staged, self._tensors),
                        interrupt,
                        is_prepared=self._receiver.is_prepared(staged),
                    )
            finally:
                self._receiver.drop(staged)
            self._base = update.version
            return _receipt(update, swapped, cost, drain, stage_s=fetched.stage_s)

    async def stage(self, update: WeightUpdate) -> None:
        """Fetch an update that `take` will be called with later."""
        async with self._lock:
            self._check(update, "inflight")
            await self._staged.keep(update)

    def name_version(self, version: int) -> None:
        """Declare the full weights, which stay as they are, to be of this version. Half-loaded ones are refused."""
        self._health.check()
        policy = next(iter(self.versions))
        unchanged = WeightUpdate(
            policy=policy, version=version, transport="none", tensors=(), buckets=(), fingerprint={}
        )
        self._swap(unchanged, lambda: lambda: 0.0, "inflight", is_prepared=True)
        self._base = version

    def close(self) -> None:
        """Drop an update that was staged and not taken."""
        self._staged.close()

    def fail(self, error: BaseException) -> None:
        """Fail every request with this error, and every new one too."""
        self._health.failure, self._health.is_half_updated = error, False
        self._fail_requests(error)

    def _await_weights(self, error: BaseException) -> None:
        """Refuse requests until a full update has succeeded, because the loaded weights are of no version."""
        self._health.failure, self._health.is_half_updated = error, True
        self._fail_requests(self._health.refusal())

    def _fail_requests(self, error: BaseException) -> None:
        for seq in self._scheduler.live():
            self._scheduler.cancel(seq)
        self._outbox.fail(error)

    def _check(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        check_update(
            update,
            interrupt,
            name=self._health.name,
            versions=self.versions,
            base=self._base,
            interrupts=INTERRUPTS,
            adds_policies=True,
            is_intact=self._health.failure is None,
        )

    def forget_cache(self) -> None:
        """Drop everything that is cached only for reuse. Blocks of running sequences stay."""
        self._scheduler.cache.clear_kept()
        self._scheduler.cache.pool.clear_index()

    def _check_alone(self, update: WeightUpdate) -> None:
        """Refuse full weights that would also change another policy: all policies without an adapter share them."""
        adapted = self._adapters.policies
        plain = [policy for policy in self.versions if policy not in adapted and policy != update.policy]
        if plain:
            raise PenstockError(
                f"{self._health.name} serves {' and '.join(map(repr, plain))} with the same full weights, got new "
                f"ones for {update.policy!r}; give a policy an adapter, or an engine of its own"
            )

    async def _take_adapter(self, update: WeightUpdate, interrupt: Interrupt) -> UpdateReceipt:
        serving = self._adapters.serving(update, self.versions)
        fetched = await self._staged.fetch(update)
        started = time.perf_counter()
        place, verify_s = await self._fill(fetched.staged, serving)
        stage_s = fetched.stage_s + time.perf_counter() - started

        def settle() -> Verification:
            serving.settle(update, place)
            return lambda: verify_s

        try:
            with self._interrupts.holding(interrupt, (update.policy,)) as drain:
                await drain.wait()
                swapped, cost = self._swap(update, settle, interrupt, is_prepared=serving.is_quick)
        except BaseException:
            serving.abandon(place)
            raise
        return _receipt(update, swapped, cost, drain, stage_s=stage_s)

    async def _fill(self, staged: Staged, serving: AdapterServing) -> tuple[Place, float]:
        """Load an adapter into tensors that no pass uses yet; return these, and how long verification took. If this
        fails, the engine serves the same as before."""
        update = staged.update
        in_order = self._receiver.stages(update)  # what was staged on a GPU was queued with its passes
        try:
            if self._abandoned:
                await asyncio.wait(self._abandoned)
            if not serving.has_room(update):
                self._stepper.drain()
                serving.make_room(update)
                self._stepper.renew()
            with self._stepper.beside(in_order=in_order):
                place = serving.open(update)
        except BaseException:
            self._receiver.drop(staged)
            raise

        def load() -> float:
            with self._stepper.beside(in_order=in_order):
                return self._receiver.load(staged, place.tensors)()

        def undo() -> None:
            serving.abandon(place)
            self._receiver.drop(staged)

        if self._stepper.runs_beside:
            try:
                verify_s = load()
            except BaseException:
                undo()
                raise
        else:
            verify_s = await self._load_in_thread(load, undo)
        self._receiver.drop(staged)
        return place, verify_s

    async def _load_in_thread(self, load: Callable[[], float], undo: Callable[[], None]) -> float:
        running = asyncio.get_running_loop().run_in_executor(None, load)

        def ended(running: "asyncio.Future[float]") -> None:
            running.exception()  # retrieve it: the task that waited is gone
            undo()
            self._abandoned.discard(running)

        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._abandoned.add(running)
            running.add_done_callback(ended)
            raise
        except BaseException:
            undo()
            raise

    def _take_off_adapters(self, update: WeightUpdate) -> None:
        """Remove all adapters, since the weights below them are about to change. Policies other than the
        update's are not served after that."""
        if not self._adapters.policies:
            return
        self._stepper.drain()
        for policy in self._adapters.policies:
            self._adapters.take_off(policy)
            if policy != update.policy:
                self._end_policy(policy, update)

    def _end_policy(self, policy: str, update: WeightUpdate) -> None:
        error = PenstockError(
            f"policy {policy!r} is no longer served: {self._health.name} got new full weights (version "
            f"{update.version} of {update.policy!r}) below its adapter; send the adapter again"
        )
        for seq in self._scheduler.live():
            if seq.policy == policy:
                self._outbox.refuse(seq, error)
        self._scheduler.cache.forget_policy(policy)
        self._stepper.forget(policy)
        del self.versions[policy]

    def _swap(
        self,
        update: WeightUpdate,
        load: Callable[[], Verification],
        interrupt: Interrupt,
        *,
        is_prepared: bool,
    ) -> tuple[Swapped, Cost]:
        """Load new weights now, between two forward passes. If that fails, the weights may be half old and half
        new."""
        if self._health.is_closed:
            raise PenstockError(f"{self._health.name} is closed")
        policy, version = update.policy, update.version
        cost = self._interrupts.new_version(policy, version, interrupt)
        try:
            swapped = self._stepper.swap(load, policy, version, is_prepared=is_prepared)
        except BaseException as error:
            self._await_weights(error)
            with suppress(Exception):  # on a device that has failed there is nothing to finish
                self._stepper.drain()
            self.forget_cache()
            raise
        self._health.failure = None
        self.versions[policy] = version
        return swapped, cost


def _receipt(
    update: WeightUpdate, swapped: Swapped, cost: Cost, drain: Drain, *, stage_s: float
) -> UpdateReceipt:
    return UpdateReceipt(
        policy=update.policy,
        version=update.version,
        stage_s=stage_s,
        stall_s=swapped.stall_s,
        verify_s=swapped.verify_s,
        drain_s=drain.took_s,
        recomputed_tokens=cost.recomputed_tokens,
        discarded_tokens=cost.discarded_tokens,
    )
