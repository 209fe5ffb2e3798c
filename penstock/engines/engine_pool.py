"""Several engines as one: each request goes to the least loaded, groups stay together."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from penstock.interfaces import Engine
from penstock.types import Chunk, EngineReport, GenerateRequest, Interrupt, UpdateReceipt, WeightUpdate

REMEMBERED = 4096
"""Prompts and requests whose engine is remembered."""


class EnginePool:
    """Requests with the same prompt go to the same engine while it works on it, forks to the engine of their
    parent: that is where their cache is. Updates go to all."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine, got none")
        self._engines = tuple(engines)
        self._loads = [0] * len(engines)
        self._homes: OrderedDict[str | bytes, int] = OrderedDict()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        index = self._choose(request)
        self._loads[index] += 1
        try:
            async with aclosing(self._engines[index].generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        finally:
            self._loads[index] -= 1

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        """Every engine takes the update; the receipt tells of the slowest. When some fail, the first error
        leaves once all have answered."""
        answers = await asyncio.gather(
            *(engine.update(update, interrupt) for engine in self._engines), return_exceptions=True
        )
        receipts = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            receipts.append(answer)
        return max(receipts, key=lambda receipt: receipt.stall_s)

    async def report(self) -> EngineReport:
        """Sums of loads and counters, the oldest served versions, what all of them can do."""
        reports = await asyncio.gather(*(engine.report() for engine in self._engines))
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
        await asyncio.gather(*(engine.close() for engine in self._engines))

    def _choose(self, request: GenerateRequest) -> int:
        prompt = request.policy.encode() + b"\0" + request.token_ids.tobytes()
        least = min(range(len(self._engines)), key=lambda each: self._loads[each])
        index = self._homes.get(request.parent.id) if request.parent is not None else None
        if index is None:
            index = self._homes.get(prompt, least)
            if self._loads[index] == 0:
                index = index if self._loads[least] == 0 else least
        for key in (prompt, request.id):
            self._homes[key] = index
            self._homes.move_to_end(key)
        while len(self._homes) > 2 * REMEMBERED:
            self._homes.popitem(last=False)
        return index
