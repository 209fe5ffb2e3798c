"""Several engines as one: each request goes to the least loaded, groups stay together."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

from penstock.interfaces import Engine
from penstock.types import Chunk, EngineReport, GenerateRequest, UpdateReceipt, WeightUpdate

REMEMBERED_PROMPTS = 4096


class EnginePool:
    """Requests with the same prompt go to the same engine, where its KV is shared; updates go to all."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self._engines = tuple(engines)
        self._loads = [0] * len(engines)
        self._homes: OrderedDict[bytes, int] = OrderedDict()
        self._served_by: OrderedDict[str, int] = OrderedDict()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        index = self._choose(request)
        self._loads[index] += 1
        stream = self._engines[index].generate(request)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            self._loads[index] -= 1
            await stream.aclose()  # type: ignore[attr-defined]

    async def update(self, update: WeightUpdate) -> UpdateReceipt:
        """Every engine takes the update; the receipt tells of the slowest."""
        receipts = await asyncio.gather(*(engine.update(update) for engine in self._engines))
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
        key = request.token_ids.tobytes()
        if request.parent is not None and request.parent.id in self._served_by:
            index = self._served_by[request.parent.id]
        elif key in self._homes and self._loads[self._homes[key]] > 0:
            index = self._homes[key]
        else:
            index = min(range(len(self._engines)), key=lambda i: self._loads[i])
        _remember(self._homes, key, index)
        _remember(self._served_by, request.id, index)
        return index


def _remember(table: "OrderedDict[str, int] | OrderedDict[bytes, int]", key: str | bytes, index: int) -> None:
    table[key] = index  # type: ignore[index]
    table.move_to_end(key)  # type: ignore[arg-type]
    if len(table) > REMEMBERED_PROMPTS:
        table.popitem(last=False)
