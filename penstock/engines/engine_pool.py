"""Presents several engines as one: balances requests, keeps groups together and rolls updates through them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec

from penstock.engines.engine_choice import EngineChoice
from penstock.engines.rolling_update import Answer, Member, num_at_once, roll, slowest, stage_all
from penstock.errors import (
    BaseMissing,
    ChannelClosed,
    EngineLost,
    OutOfMemory,
    PenstockError,
    UpdateAbandoned,
)
from penstock.records import (
    AnswerSoFar,
    Chunk,
    EngineReport,
    GenerateRequest,
    Interrupt,
    UpdateReceipt,
    WeightUpdate,
)
from penstock.records.interfaces import Engine


class EnginePool:
    """Sends each request to the least loaded engine, or to the one that has its KV cache (`engine_choice.py`), and
    each update to all engines. Engines may join and leave at any time. When one is lost, others continue its
    requests; without any other, requests wait for a replacement, or fail if none will join."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        resumes: bool = True,
        replaces: bool = False,
        load_share: float = 0.25,
    ) -> None:
        """`resumes`: an answer may continue under another version, on another engine. `replaces`: another engine
        joins for each one whose process ends. If that was the last engine, requests and updates wait for its
        replacement. `load_share` of the engines load new weights at once, never all of several."""
        if not engines:
            raise ValueError("a pool needs at least one engine, got none")
        self._resumes = resumes
        self._replaces = replaces
        self._load_share = load_share
        self._awaited: set[str] = set()
        """Engines that are lost and will be replaced."""
        self._changed = asyncio.Event()
        """Set, and then replaced by a new event, when an engine has joined, left or taken an update."""
        self._members = {name: Member(name, engine) for name, engine in engines.items()}
        self._choice = EngineChoice()
        self._updating = asyncio.Lock()
        self._begun: tuple[str, int] | None = None
        """Policy and version of an update that only some engines have taken."""
        self.on_lost: Callable[[str, EngineLost], None] | None = None
        """Called when an engine is lost, so that the caller sends it weights. Without this callback a lost
        engine stays lost."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    def expects(self, name: str) -> bool:
        """Return whether an engine of this name is in the pool, or is lost and will be replaced."""
        return name in self._members or name in self._awaited

    async def wait_serving(self, name: str) -> None:
        """Wait until an enlisted engine takes requests."""
        while name not in self._members or self._members[name].is_lost:
            await self._changed.wait()

    async def join(self, name: str, engine: Engine, update: WeightUpdate | None = None) -> None:
        """Add an engine after bringing it to the weights of `update`, so that its first token is sampled with
        them. Updates of the pool wait meanwhile, so the new engine misses none."""
        async with self._updating:
            self._check_new(name)
            if update is not None:
                await engine.update(update)
            self._add(Member(name, engine))

    def enlist(self, name: str, engine: Engine) -> None:
        """Add an engine that gets no request until it has taken the next update."""
        self._check_new(name)
        self._add(Member(name, engine, is_lost=True))

    def lose(self, name: str) -> int:
        """Remove an engine whose process is gone, and let others continue its requests. Return how many it had."""
        member = self._members[name]
        member.is_expelled = True
        self.leave(name)
        if self._replaces:
            self._awaited.add(name)
        self._wake()
        return member.load

    def expect_no_more(self, name: str) -> None:
        """Stop waiting for a replacement of an engine that was lost."""
        self._awaited.discard(name)
        self._wake()

    def leave(self, name: str) -> Engine:
        """Remove an engine, which gets no further requests or updates. Requests that it works on continue there,
        or fail with it; `expel_failed` and `retire` hand them to other engines."""
        member = self._members.pop(name)
        self._choice.forget(member)
        return member.engine

    async def retire(self, name: str, *, drain_s: float) -> int:
        """Remove an engine gracefully: it finishes its requests while others take new ones. Requests that are
        unfinished after `drain_s` continue on other engines; return how many there were."""
        member = self._members[name]
        if all(other.is_leaving for other in self._serving() if other is not member):
            raise ValueError(f"{name} is the only engine that takes requests, and can't leave")
        member.is_leaving = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    while member.load and self._members.get(name) is member:
                        await self._changed.wait()
        finally:
            member.is_expelled = True
            if self._members.get(name) is member:
                self.leave(name)
        return member.load

    @property
    def num_idle(self) -> int:
        """Return how many engines could take requests and have none."""
        return sum(not member.load for member in self._serving())

    async def mend(self, bring: Callable[[Engine], Awaitable[None]]) -> None:
        """Use `bring` to send the weights below an adapter to the engines that lacked them at the last update.
        These engines get no request until they have taken the update itself."""
        async with self._updating:
            for member in [each for each in self._members.values() if isinstance(each.failure, BaseMissing)]:
                member.is_lost = True
                self._wake()
                await bring(member.engine)

    async def expel_failed(self, kind: type[BaseException] = BaseException) -> dict[str, int]:
        """Remove and close the engines that failed the last update for a reason of this `kind`, unless that
        would be all of them. Others continue their requests. Return how many requests each had, by name."""
        failed = [member for member in self._members.values() if isinstance(member.failure, kind)]
        if len(failed) == len(self._members):
            return {}
        loads = {member.name: member.load for member in failed}
        for member in failed:
            member.is_expelled = True
            self.leave(member.name)
        await asyncio.gather(*(member.engine.close() for member in failed), return_exceptions=True)
        return loads

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Generate on one engine. If it is expelled or lost, another engine continues after the tokens that have
        arrived. Where that is impossible it starts from the beginning, and the next chunk says so."""
        answer, is_void = AnswerSoFar(request), False
        while not answer.is_over:
            if not self._serving():
                await self._wait_for_engine(serving=True)
            member, is_lost = self._choice.find(request, self._serving()), False
            at_work = self._choice.begin(request, member)
            try:
                async with aclosing(member.engine.generate(request)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        if member.is_expelled:
                            break
                        chunk = msgspec.structs.replace(chunk, restarts=True) if is_void else chunk
                        answer.add(chunk)
                        is_void = False
                        yield chunk
            except EngineLost as error:
                is_lost = True
                self._lose_server(member, error)
                if self.on_lost is None and not self._serving():
                    raise
            except Exception as error:
                if not member.is_expelled and not self._is_gone(member, error):
                    raise
            finally:
                self._choice.end(request, at_work)
                if member.is_leaving and not member.load:
                    self._wake()
            if answer.is_over or not (member.is_expelled or is_lost):
                return
            answer.records_routing = "routing" in (await self.report()).capabilities
            handed_on = answer.hand_on(resumes=self._resumes)
            request, is_void = handed_on.request, is_void or handed_on.is_void
            for chunk in handed_on.again:
                answer.add(chunk)
                yield chunk

    async def stage(self, update: WeightUpdate) -> None:
        async with self._updating:
            for failure in await stage_all(self._present(), update):
                if failure is not None:
                    raise failure

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        """Update the engines, a share at a time, and return a receipt with the times of the slowest. When some
        fail, the first error is raised after all have answered. If one can't stage an update that is sent to all at
        once, the others are cancelled, and all keep their weights. A retry skips engines that already have the
        update."""
        begun = (update.policy, update.version)
        while True:
            await self._wait_for_engine()
            async with self._updating:
                if not self._members:
                    continue
                members = [member for member in self._present() if not member.has(update)]
                if not members and self._begun == begun:  # those that lacked it have left
                    self._begun = None
                    return slowest([member.acknowledged[update.policy] for member in self._present()])
                members = members or self._present()
                self._begun = begun
                for member in members:
                    member.failure = None
                num_serving = sum(not member.is_leaving for member in self._serving())
                at_once = num_at_once(num_serving, self._load_share)
                receipts = self._receipts(members, await roll(members, update, interrupt, at_once=at_once))
                if not receipts and not self._members and self._awaited:
                    continue  # every engine left meanwhile, and replacements will join
                self._begun = None
                if not receipts:
                    raise PenstockError("every engine left the pool while it was updated")
                self._wake()  # a new engine may take requests now
                return slowest(receipts)

    def _receipts(self, members: Sequence[Member], answers: Sequence[Answer]) -> list[UpdateReceipt]:
        """Collect the receipts, or raise the first error of an engine that is still in the pool."""
        receipts = []
        for member, answer in zip(members, answers, strict=True):
            if not isinstance(answer, BaseException):
                receipts.append(answer)
            elif isinstance(answer, asyncio.CancelledError | UpdateAbandoned):
                continue  # it was cancelled because another engine failed
            elif self._is_gone(member, answer) or self._members.get(member.name) is not member:
                continue  # an engine that has left may fail
            else:
                member.failure = answer
        for failed in self._members.values():
            if failed.failure is not None:
                raise failed.failure
        for answer in answers:
            if isinstance(answer, UpdateAbandoned):
                raise answer
        return receipts

    async def reports(self) -> list[EngineReport]:
        while True:
            await self._wait_for_engine()
            members = self._present()
            asking = (member.engine.report() for member in members)
            answers = await asyncio.gather(*asking, return_exceptions=True)
            reports = []
            for member, answer in zip(members, answers, strict=True):
                if not isinstance(answer, BaseException):
                    reports.append(answer)
                elif not member.is_expelled and not self._is_gone(member, answer):
                    raise answer
            if reports:
                return reports

    async def report(self) -> EngineReport:
        """Return one report for the pool: sums of loads and counters, the oldest served versions, and the
        capabilities that all engines share."""
        reports = await self.reports()
        first = reports[0]
        names = {name for report in reports for name in report.counters}
        return EngineReport(
            name="pool" if len(reports) > 1 else first.name,
            versions={
                policy: min(report.versions.get(policy, -1) for report in reports)
                for policy in first.versions
            },
            capabilities=tuple(
                one for one in first.capabilities if all(one in report.capabilities for report in reports)
            ),
            num_running=sum(report.num_running for report in reports),
            num_waiting=sum(report.num_waiting for report in reports),
            max_context=min(report.max_context for report in reports),
            counters={name: sum(report.counters.get(name, 0.0) for report in reports) for name in names},
        )

    async def close(self) -> None:
        await asyncio.gather(*(member.engine.close() for member in self._members.values()))

    def _present(self) -> list[Member]:
        if not self._members:
            raise PenstockError("the pool has no engine left")
        return list(self._members.values())

    def _lose_server(self, member: Member, error: EngineLost) -> None:
        if not member.is_lost and self._members.get(member.name) is member:
            member.is_lost = True
            if self.on_lost is not None:
                self.on_lost(member.name, error)

    def _check_new(self, name: str) -> None:
        if name in self._members:
            raise ValueError(f"the pool has an engine {name!r} already; it must leave first")

    def _add(self, member: Member) -> None:
        self._members[member.name] = member
        self._awaited.discard(member.name)
        self._wake()

    def _is_gone(self, member: Member, error: BaseException) -> bool:
        """Return whether this error means that the engine's process is gone, and remove the engine then, if another
        will replace it. An engine that runs out of memory ends its process."""
        is_gone = self._replaces and isinstance(error, ChannelClosed | OutOfMemory)
        if not is_gone or self._members.get(member.name) is not member:
            return False
        self.lose(member.name)
        return True

    def _serving(self) -> list[Member]:
        return [member for member in self._members.values() if not member.is_lost]

    async def _wait_for_engine(self, *, serving: bool = False) -> None:
        """Wait for an engine, or with `serving` for one that takes requests. Raise if none will join."""
        while self._awaited or (serving and self._members):
            if self._serving() if serving else self._members:
                return
            await self._changed.wait()
        self._present()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
