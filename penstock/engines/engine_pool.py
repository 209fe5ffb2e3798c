"""Several engines as one: each request goes to the least loaded, groups stay together."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from penstock.errors import PenstockError
from penstock.interfaces import Engine
from penstock.types import Chunk, EngineReport, GenerateRequest, Interrupt, UpdateReceipt, WeightUpdate

REMEMBERED = 4096
"""Prompts and requests whose engine is remembered."""


@dataclass(slots=True, eq=False)
class Member:
    """An engine of the pool, how many requests it works on, and what it has acknowledged last of each policy."""

    name: str
    engine: Engine
    load: int = 0
    acknowledged: dict[str, UpdateReceipt] = field(default_factory=dict)

    async def update(self, update: WeightUpdate, interrupt: Interrupt) -> UpdateReceipt:
        self.acknowledged.pop(update.policy, None)
        receipt = self.acknowledged[update.policy] = await self.engine.update(update, interrupt)
        return receipt

    def has(self, update: WeightUpdate) -> bool:
        receipt = self.acknowledged.get(update.policy)
        return receipt is not None and receipt.version == update.version


class EnginePool:
    """Requests with the same prompt go to the same engine while it works on it, forks to the engine of their
    parent: that is where their cache is. Updates go to all. Members may come and go at any time."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine, got none")
        self._members = {name: Member(name, engine) for name, engine in engines.items()}
        self._homes: OrderedDict[str | bytes, Member] = OrderedDict()
        self._updating = asyncio.Lock()

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
        it."""
        member = self._members.pop(name)
        for key in [key for key, home in self._homes.items() if home is member]:
            del self._homes[key]
        return member.engine

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        member = self._choose(request)
        member.load += 1
        try:
            async with aclosing(member.engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        finally:
            member.load -= 1

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        """Every engine takes the update; the receipt tells of the slowest. When some fail, the first error
        leaves once all have answered. Where it is sent to all at once, the others are told as soon as one fails,
        and stay as they are. When it is tried again, those that have it are not asked again."""
        async with self._updating:
            members = [member for member in self._present() if not member.has(update)] or self._present()
            take = _take_together if update.sends else _take_each
            answers = await take(members, update, interrupt)
        receipts = []
        for member, answer in zip(members, answers, strict=True):
            if not isinstance(answer, BaseException):
                receipts.append(answer)
            elif isinstance(answer, asyncio.CancelledError):
                continue  # it was told that another one failed
            elif self._members.get(member.name) is member:  # one that has left may fail
                raise answer
        if not receipts:
            raise PenstockError("every engine left the pool while it was updated")
        return max(receipts, key=lambda receipt: receipt.stall_s)

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
        least = min(self._present(), key=lambda member: member.load)
        home = self._homes.get(request.parent.id) if request.parent is not None else None
        if home is None:
            home = self._homes.get(prompt, least)
        for key in (prompt, request.id):
            self._homes[key] = home
            self._homes.move_to_end(key)
        while len(self._homes) > 2 * REMEMBERED:
            self._homes.popitem(last=False)
        return home


async def _take_each(
    members: list[Member], update: WeightUpdate, interrupt: Interrupt
) -> list[UpdateReceipt | BaseException]:
    updates = (member.update(update, interrupt) for member in members)
    return await asyncio.gather(*updates, return_exceptions=True)


async def _take_together(
    members: list[Member], update: WeightUpdate, interrupt: Interrupt
) -> list[UpdateReceipt | BaseException]:
    """At one moment: the first that fails cancels the others, which tells them."""
    update = msgspec.structs.replace(update, receivers=len(members))
    tasks = [asyncio.ensure_future(member.update(update, interrupt)) for member in members]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
