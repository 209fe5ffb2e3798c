"""Several engines as one: each request goes to the least loaded, groups stay together, updates roll."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

import msgspec

from penstock.engines.rolling_update import Member, roll, slowest, stage_all
from penstock.errors import PenstockError, UpdateAbandoned
from penstock.interfaces import Engine
from penstock.types import Chunk, EngineReport, GenerateRequest, Interrupt, UpdateReceipt, WeightUpdate

REMEMBERED = 4096
"""Prompts and requests whose engine is remembered."""


class EnginePool:
    """Requests with the same prompt go to the same engine while it works on it, forks to the engine of their
    parent: that is where their cache is. Updates go to all. Members may come and go at any time."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine, got none")
        self._members = {name: Member(name, engine) for name, engine in engines.items()}
        self._homes: OrderedDict[str | bytes, Member] = OrderedDict()
        self._updating = asyncio.Lock()
        self._begun: tuple[str, int] | None = None
        """Policy and version of an update that some engines have and others do not."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    async def join(self, name: str, engine: Engine, update: WeightUpdate | None = None) -> None:
        """Add an engine. It is brought to the weights of `update` first, so that its first token is sampled with
        them; updates of the pool wait meanwhile, so that it misses none."""
        async with self._updating:
            if name in self._members:
                raise ValueError(f"the pool has an engine {name!r} already; it must leave first")
            if update is not None:
                await engine.update(update)
            self._members[name] = Member(name, engine)

    def leave(self, name: str) -> Engine:
        """Take an engine out: it gets no further requests or updates. What it works on goes on, or fails with
        it. (`expel` gives that to others.)"""
        member = self._members.pop(name)
        for key in [key for key, home in self._homes.items() if home is member]:
            del self._homes[key]
        return member.engine

    async def expel_failed(self) -> dict[str, int]:
        """Engines that did not take the last update leave, and are closed, unless that would be all. Their requests
        begin again on the others. Returns how many each had, by name."""
        failed = [member for member in self._members.values() if member.failure is not None]
        if len(failed) == len(self._members):
            return {}
        loads = {member.name: member.load for member in failed}
        for member in failed:
            member.is_expelled = True
            self.leave(member.name)
        await asyncio.gather(*(member.engine.close() for member in failed), return_exceptions=True)
        return loads

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """On one engine, and from the beginning on another if that one is expelled."""
        is_void = has_ended = False
        while not has_ended:
            member, has_sent = self._choose(request), False
            member.load += 1
            try:
                async with aclosing(member.engine.generate(request)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        if member.is_expelled:
                            break
                        has_sent, has_ended = True, chunk.finish_reason is not None
                        yield msgspec.structs.replace(chunk, restarts=True) if is_void else chunk
                        is_void = False
            except Exception:
                if not member.is_expelled:
                    raise
            finally:
                member.load -= 1
            has_ended = has_ended or not member.is_expelled
            is_void = is_void or has_sent

    async def stage(self, update: WeightUpdate) -> None:
        async with self._updating:
            for failure in await stage_all(self._present(), update):
                if failure is not None:
                    raise failure

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        """Every engine takes the update, one after the other; the receipt tells of the slowest. When some fail, the
        first error leaves once all have answered. Where it is sent to all at once, the others are told as soon as
        one fails, and stay as they are. When it is tried again, those that have it are not asked again."""
        async with self._updating:
            members = [member for member in self._present() if not member.has(update)]
            is_retry = self._begun == (update.policy, update.version)
            if not members and is_retry:  # those that lacked it have left
                self._begun = None
                return slowest([member.acknowledged[update.policy] for member in self._present()])
            members = members or self._present()
            self._begun = (update.policy, update.version)
            for member in members:
                member.failure = None
            answers = await roll(members, update, interrupt)
        receipts = []
        for member, answer in zip(members, answers, strict=True):
            if not isinstance(answer, BaseException):
                receipts.append(answer)
            elif isinstance(answer, asyncio.CancelledError | UpdateAbandoned):
                continue  # it was told that another one failed
            elif self._members.get(member.name) is member:  # one that has left may fail
                member.failure = answer
        for failed in self._members.values():
            if failed.failure is not None:
                raise failed.failure
        for answer in answers:
            if isinstance(answer, UpdateAbandoned):
                raise answer
        self._begun = None
        if not receipts:
            raise PenstockError("every engine left the pool while it was updated")
        return slowest(receipts)

    async def reports(self) -> list[EngineReport]:
        """One for each engine."""
        return list(await asyncio.gather(*(member.engine.report() for member in self._present())))

    async def report(self) -> EngineReport:
        """Sums of loads and counters, the oldest served versions, what all of them can do."""
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

    def _choose(self, request: GenerateRequest) -> Member:
        prompt = request.policy.encode() + b"\0" + request.token_ids.tobytes()
        least = min(self._present(), key=lambda member: (member.is_draining, member.load))
        home = self._homes.get(request.parent.id) if request.parent is not None else None
        if home is None:
            home = self._homes.get(prompt, least)
        if home.is_draining:
            home = least
        for key in (prompt, request.id):
            self._homes[key] = home
            self._homes.move_to_end(key)
        while len(self._homes) > 2 * REMEMBERED:
            self._homes.popitem(last=False)
        return home
