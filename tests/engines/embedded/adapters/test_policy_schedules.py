"""Two policies and the base under any schedule: every pass is peft's, and no key is ever read by another policy."""

import asyncio
import copy

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.scheduler import Batch
from penstock.records import GenerateRequest
from tests.engines.contract import interrupt_of
from tests.engines.embedded.adapters.peft_models import ATTENTION, Adapter, World, make_adapter
from tests.engines.embedded.test_exact import play_move
from tests.engines.embedded.test_swaps import Shadow, drawn_settings
from tests.engines.embedded.tiny import Driver, make_engine, make_model

POLICIES = ("policy", "b", "base")


class Trained:
    """Version n of a policy is the adapter of a seed of its own; version 0 is the base."""

    def __init__(self) -> None:
        self.base = make_model("llama")
        self._known: dict[tuple[str, int], Adapter] = {}

    def adapter(self, policy: str, version: int) -> Adapter:
        key = (policy, version)
        if key not in self._known:
            targets = ATTENTION if policy == "b" else "all-linear"
            seed = 100 * POLICIES.index(policy) + version
            self._known[key] = make_adapter(self.base, seed, rank=2 + version % 2, targets=targets)
        return self._known[key]

    def model(self, key: tuple[str, int]) -> nn.Module:
        return self.base if key[1] == 0 else self.adapter(*key).model


class PolicyShadow(Shadow):
    """Also keeps whose keys lie in each place of the cache, and whose are read."""

    def __init__(self, engine: EmbeddedEngine, trained: Trained) -> None:
        super().__init__(engine, trained)  # type: ignore[arg-type]
        self.owners: dict[tuple[int, int], str] = {}

    def check(self, batch: Batch, logits: torch.Tensor, version: int) -> None:
        before = dict(self.owners)
        self.copy(batch.copies)
        size, row = self.engine.config.block_size, 0
        for source, target in batch.copies:
            for offset in range(size):
                if (source, offset) in before:
                    self.owners[target, offset] = before[source, offset]
        for seq, first, count in batch.spans:
            slots = [(seq.blocks[place // size], place % size) for place in range(first + count)]
            assert {self.owners[slot] for slot in slots[:first]} <= {seq.policy}
            self.owners |= dict.fromkeys(slots[first:], seq.policy)
            key = (seq.policy, self.engine.versions[seq.policy])
            expected = self.compute(seq.blocks, seq.tokens[first : first + count], first, key)  # type: ignore[arg-type]
            if first + count == seq.num_tokens:
                actual = torch.log_softmax(logits[row], dim=-1)
                torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
                row += 1


class MixedDriver(Driver):
    """Its requests go to the policies in turn; so a fork is often one of another policy's request."""

    async def start(self, request: GenerateRequest) -> None:
        policy = POLICIES[len(self.requests) % len(POLICIES)]
        await super().start(msgspec.structs.replace(request, policy=policy))


def open_engine(trained: Trained, world: World, data: st.DataObject) -> EmbeddedEngine:
    return make_engine(
        copy.deepcopy(trained.base),
        receiver=world.receiver,
        versions={"policy": 0, "b": 0, "base": 0},
        max_adapters=2,
        **drawn_settings(data, least_batch=2),
    )


@pytest.mark.full
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_schedule_with_updates_of_any_policy_is_peft_s(data: st.DataObject) -> None:
    """Groups, forks, cancellations, preemption, and adapters that arrive between any two passes."""
    trained, world = Trained(), World()

    async def main() -> None:
        engine = open_engine(trained, world, data)
        PolicyShadow(engine, trained)
        driver = MixedDriver(engine)
        for _ in range(data.draw(st.integers(2, 8), label="moves")):
            if data.draw(st.booleans(), label="update"):
                policy = data.draw(st.sampled_from(POLICIES[:2]))
                version = engine.versions[policy] + 1
                update = world.adapter(trained.adapter(policy, version), version, policy=policy)
                await engine.update(update, interrupt_of(data.draw(st.booleans(), label="rebuild")))
            await play_move(driver, data)
        await driver.drain()
        for name in driver.finished():
            versions = driver.versions(name)
            assert versions == sorted(versions)
            if driver.requests[name].policy == "base":
                assert set(versions) == {0}
        driver.check_nothing_is_held()

    asyncio.run(main())
