"""Policies with adapters in one engine: unmerged, merged and peft agree, and nobody shares a key."""

import asyncio
import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.engines.embedded.adapters import merged as merged_adapters
from penstock.errors import (
    BaseMissing,
    EngineLost,
    FingerprintMismatch,
    PenstockError,
    RequestRefused,
)
from penstock.records import Parent
from penstock.records.interfaces import Staged, Verification
from penstock.sync.in_process import Exchange, InProcessReceiver
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import AnyReceiver, Rendezvous, make_publisher
from tests.engines.contract import ask, collect
from tests.engines.embedded.adapters.peft_models import ATTENTION, MLP, Adapter, World, make_adapter
from tests.engines.embedded.test_exact import generate, plain_table
from tests.engines.embedded.tiny import Driver, make_engine, make_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def open_world(base: nn.Module, *, device: str = "cpu", **options: Any) -> tuple[World, Driver]:
    world = World()
    model = copy.deepcopy(base).to(device)
    return world, Driver(make_engine(model, receiver=world.receiver, **{"max_adapters": 1, **options}))


def check_answer(driver: Driver, name: str, model: nn.Module) -> None:
    """Greedy tokens are the model's own, and the logprobs those of a plain forward."""
    prompt = driver.requests[name].token_ids.tolist()
    output = driver.output(name)
    assert output == generate(model, prompt, len(output))
    expected = plain_table(model, prompt, output).gather(1, torch.tensor(output)[:, None])[:, 0]
    torch.testing.assert_close(driver.logprobs(name), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("how", ["unmerged", "merged"])
@pytest.mark.parametrize("targets", ["all-linear", ATTENTION, MLP], ids=["all", "attention", "mlp"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_adapter_answers_as_peft_does(family: str, targets: Any, how: str) -> None:
    base = make_model(family)
    adapter = make_adapter(base, 1, targets=targets)

    async def main() -> None:
        world, driver = open_world(base, adapters=how)
        await driver.engine.update(world.adapter(adapter, 1))
        await driver.start(ask("a", PROMPT, max_tokens=12, temperature=0.0))
        await driver.drain()
        check_answer(driver, "a", adapter.model)
        assert driver.versions("a") == [1] * 12
        assert driver.output("a") != generate(base, PROMPT, 12)

    asyncio.run(main())


@pytest.mark.parametrize(("family", "targets"), [("gemma3", ATTENTION), ("gpt_neox", "all-linear")])
def test_no_model_is_known_by_name(family: str, targets: Any) -> None:
    base = make_model(family)
    adapter = make_adapter(base, 1, targets=targets)

    async def main() -> None:
        world, driver = open_world(base)
        await driver.engine.update(world.adapter(adapter, 1))
        await driver.start(ask("a", PROMPT, max_tokens=8, temperature=0.0))
        await driver.drain()
        check_answer(driver, "a", adapter.model)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["unmerged", "merged"])
def test_rslora_scales_by_the_root_of_the_rank(how: str) -> None:
    base = make_model()
    adapter = make_adapter(base, 1, use_rslora=True, lora_alpha=3)

    async def main() -> None:
        world, driver = open_world(base, adapters=how)
        await driver.engine.update(world.adapter(adapter, 1))
        await driver.start(ask("a", PROMPT, max_tokens=12, temperature=0.0))
        await driver.drain()
        check_answer(driver, "a", adapter.model)

    asyncio.run(main())


def test_dora_is_merged_and_every_update_starts_from_the_base() -> None:
    base = make_model("qwen2")
    versions = {version: make_adapter(base, version, use_dora=True) for version in (1, 2)}

    async def main() -> None:
        world, driver = open_world(base)
        for version, adapter in versions.items():
            await driver.engine.update(world.adapter(adapter, version))
            await driver.start(ask(str(version), PROMPT, max_tokens=8, temperature=0.0))
            await driver.drain()
            check_answer(driver, str(version), adapter.model)

    asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_merged_the_output_embedding_may_have_an_adapter_too(options: dict[str, Any]) -> None:
    base = make_model("llama")
    adapter = make_adapter(base, 1, targets=["lm_head", "q_proj"], **options)

    async def main() -> None:
        world, driver = open_world(base, adapters="merged")
        await driver.engine.update(world.adapter(adapter, 1))
        await driver.start(ask("a", PROMPT, max_tokens=12, temperature=0.0))
        await driver.drain()
        check_answer(driver, "a", adapter.model)

    asyncio.run(main())


def three_policies(base: nn.Module) -> dict[str, Adapter]:
    """Of different ranks and layers, so that stacks are padded and grow."""
    return {
        "policy": make_adapter(base, 1, rank=2, targets=ATTENTION),
        "b": make_adapter(base, 2, rank=5),
        "c": make_adapter(base, 3, rank=3, targets=["q_proj", "v_proj", "down_proj"], lora_alpha=5),
    }


def test_several_policies_and_the_base_answer_in_one_batch() -> None:
    base = make_model("qwen2")
    adapters = three_policies(base)
    models = {name: adapter.model for name, adapter in adapters.items()} | {"base": base}

    async def main() -> None:
        world, driver = open_world(base, max_adapters=3, versions={"policy": 0, "base": 0})
        for version, (policy, adapter) in enumerate(adapters.items(), start=1):
            await driver.engine.update(world.adapter(adapter, version, policy=policy))
        for policy in models:
            for number in range(2):
                await driver.start(
                    ask(f"{policy}{number}", PROMPT, max_tokens=10 + number, temperature=0.0, policy=policy)
                )
        await driver.drain()
        for policy, model in models.items():
            for number in range(2):
                check_answer(driver, f"{policy}{number}", model)
        report = await driver.engine.report()
        assert report.versions == {"policy": 1, "base": 0, "b": 2, "c": 3}
        assert driver.versions("c0") == [3] * 10
        assert report.counters["prefill_tokens"] == 4 * len(PROMPT)  # once a policy, never for two

    asyncio.run(main())


def test_before_its_adapter_a_policy_is_the_base_and_its_keys_are_not_reused_after() -> None:
    base = make_model("llama")
    adapters = {version: make_adapter(base, version) for version in (1, 2)}

    async def main() -> None:
        world, driver = open_world(base)
        await driver.start(ask("v0", PROMPT, max_tokens=6, temperature=0.0))
        await driver.drain()
        check_answer(driver, "v0", base)
        for version, adapter in adapters.items():
            await driver.engine.update(world.adapter(adapter, version))
            await driver.start(ask(f"v{version}", PROMPT, max_tokens=6, temperature=0.0))
            await driver.drain()
            check_answer(driver, f"v{version}", adapter.model)

    asyncio.run(main())


def test_an_update_of_one_policy_leaves_the_others_as_they_are() -> None:
    base = make_model("llama")
    first, second, other = (make_adapter(base, seed) for seed in (1, 2, 3))

    async def main() -> None:
        world, driver = open_world(base, max_adapters=2)
        await driver.engine.update(world.adapter(first, 1))
        await driver.engine.update(world.adapter(other, 7, policy="b"))
        await driver.start(ask("a", PROMPT, max_tokens=14, temperature=0.0))
        await driver.start(ask("b", PROMPT, max_tokens=14, temperature=0.0, policy="b"))
        for _ in range(5):
            await driver.step()
        await driver.engine.update(world.adapter(second, 2), "inflight_recompute")
        await driver.drain()
        assert driver.versions("a") == [1] * 5 + [2] * 9
        assert driver.versions("b") == [7] * 14
        check_answer(driver, "b", other.model)
        known = PROMPT + driver.output("a")[:5]
        assert driver.output("a")[5:] == generate(second.model, known, 9)  # its cache was computed again

    asyncio.run(main())


def test_a_fork_of_another_policy_computes_its_own_keys() -> None:
    base = make_model("llama")
    adapters = {"policy": make_adapter(base, 1), "b": make_adapter(base, 2)}

    async def main() -> None:
        world, driver = open_world(base, max_adapters=2)
        for version, (policy, adapter) in enumerate(adapters.items(), start=1):
            await driver.engine.update(world.adapter(adapter, version, policy=policy))
        await driver.start(ask("parent", PROMPT, max_tokens=4, temperature=0.0))
        await driver.drain()
        whole = PROMPT + driver.output("parent")
        for policy in adapters:
            fork = ask(
                policy,
                whole,
                max_tokens=6,
                temperature=0.0,
                policy=policy,
                parent=Parent(id="parent", keep=14),
            )
            await driver.start(fork)
        await driver.drain()
        for policy, adapter in adapters.items():
            check_answer(driver, policy, adapter.model)

    asyncio.run(main())


def test_a_damaged_adapter_leaves_the_policy_on_the_one_before() -> None:
    base = make_model("llama")
    good, bad, next_one = (make_adapter(base, seed) for seed in (1, 2, 3))

    async def main() -> None:
        world, driver = open_world(base)
        await driver.engine.update(world.adapter(good, 1))
        await driver.start(ask("a", PROMPT, max_tokens=8, temperature=0.0))
        await driver.step()
        for version in (2, 3):
            update = world.adapter(bad, version)
            world.exchange[update.buckets[0]][5] ^= 1
            with pytest.raises(FingerprintMismatch, match=f"version {version}: 1 of 42 tensors"):
                await driver.engine.update(update)
        await driver.drain()
        check_answer(driver, "a", good.model)
        assert driver.versions("a") == [1] * 8
        await driver.engine.update(world.adapter(next_one, 4))
        await driver.start(ask("b", PROMPT, max_tokens=8, temperature=0.0))
        await driver.drain()
        check_answer(driver, "b", next_one.model)

    asyncio.run(main())


@pytest.mark.parametrize("served", [True, False], ids=["later", "first"])
def test_a_merge_that_fails_half_way_is_mended_by_the_weights_below_and_the_next_adapter(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, other = make_model("llama"), make_model("llama", seed=5)
    good, bad = (make_adapter(base, seed) for seed in (1, 2))
    above = make_adapter(other, 3)
    merge, merged = merged_adapters.merge, []

    def merge_two(*arguments: Any) -> torch.Tensor:
        merged.append(1)
        if len(merged) > 2:
            raise OSError("no memory")
        return merge(*arguments)

    async def main() -> None:
        world, driver = open_world(base, adapters="merged")
        if served:
            await driver.engine.update(world.adapter(good, 1))
        with monkeypatch.context() as patch:
            patch.setattr(merged_adapters, "merge", merge_two)
            with pytest.raises(OSError, match="no memory"):
                await driver.engine.update(world.adapter(bad, 2))
        with pytest.raises(EngineLost, match="engine0 has failed: no memory"):
            await collect(driver.engine.generate(ask("lost", PROMPT)))
        with pytest.raises(BaseMissing, match="has weights of no version"):
            await driver.engine.update(world.adapter(good, 3))
        if served:
            await driver.engine.update(world.full(base, 0))
            await driver.engine.update(world.adapter(good, 3))
            await driver.start(ask("a", PROMPT, max_tokens=8, temperature=0.0))
            await driver.drain()
            check_answer(driver, "a", good.model)
        await driver.engine.update(world.full(other, 4))
        await driver.engine.update(world.adapter(above, 5, base=4))
        await driver.start(ask("b", PROMPT, max_tokens=8, temperature=0.0))
        await driver.drain()
        check_answer(driver, "b", above.model)

    asyncio.run(main())


def test_new_full_weights_take_off_the_adapters_above_them() -> None:
    base, other = make_model("llama"), make_model("llama", seed=1)
    adapters = {"policy": make_adapter(base, 1), "b": make_adapter(base, 2)}
    above = make_adapter(other, 3)

    async def main() -> None:
        world, driver = open_world(base, max_adapters=2)
        for version, (policy, adapter) in enumerate(adapters.items(), start=1):
            await driver.engine.update(world.adapter(adapter, version, policy=policy))
        engine = driver.engine
        waiting = asyncio.create_task(collect(engine.generate(ask("b", max_tokens=9, policy="b"))))
        await asyncio.sleep(0)
        await engine.update(world.full(other, 5))
        with pytest.raises(
            PenstockError, match="policy 'b' is no longer served: engine0 got new full weights"
        ):
            await waiting
        assert engine.versions == {"policy": 5}
        with pytest.raises(RequestRefused, match="serves policy 'policy', got 'b'"):
            await collect(engine.generate(ask("b2", policy="b")))
        await driver.start(ask("full", PROMPT, max_tokens=6, temperature=0.0))
        await driver.drain()
        check_answer(driver, "full", other)
        with pytest.raises(
            PenstockError, match="serves version 5, got .* an adapter for version 0; send it a full"
        ):
            await engine.update(world.adapter(adapters["b"], 6, policy="b"))
        await engine.update(world.adapter(above, 6, policy="b", base=5))
        await driver.start(ask("again", PROMPT, max_tokens=6, temperature=0.0, policy="b"))
        await driver.drain()
        check_answer(driver, "again", above.model)

    asyncio.run(main())


def test_full_weights_of_a_merged_adapter_are_the_new_base() -> None:
    base, other = make_model("llama"), make_model("llama", seed=1)

    async def main() -> None:
        world, driver = open_world(base, adapters="merged")
        await driver.engine.update(world.adapter(make_adapter(base, 1, targets=MLP), 1))
        await driver.engine.update(world.full(other, 2))
        above = make_adapter(other, 2, targets=ATTENTION)
        await driver.engine.update(world.adapter(above, 3, base=2))
        await driver.start(ask("a", PROMPT, max_tokens=6, temperature=0.0))
        await driver.drain()
        check_answer(driver, "a", above.model)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "known", "new", "message"),
    [
        ({"max_adapters": 2}, {}, {"policy": "b"}, None),
        ({}, {"policy": "b"}, {"policy": "c"}, "policy 'c' would be adapter 2, and engine.embedded.max_adapters=1"),
        ({"max_adapter_rank": 3}, None, {}, "has rank 4, and engine.embedded.max_adapter_rank=3"),
        ({"adapters": "unmerged"}, None, {"use_dora": True}, "DoRA is served merged"),
        ({"adapters": "merged"}, {}, {"policy": "b"}, "policy 'b' that is merged would change .* 'policy' too"),
        ({}, {}, {"use_dora": True}, "has an adapter that is not merged, got one that is; send the full"),
        ({}, {"use_dora": True}, {}, "has an adapter that is merged, got one that is not"),
        ({}, None, {"targets": ["lm_head"]}, "which makes the logits"),
        ({}, None, {"targets": ["embed_tokens"]}, "tensors of an adapter must end in lora_A.weight"),
    ],
)  # fmt: skip
def test_what_is_served_and_what_is_refused(
    options: dict[str, Any], known: dict[str, Any] | None, new: dict[str, Any], message: str | None
) -> None:
    base = make_model("llama")

    async def main() -> None:
        world, driver = open_world(base, **options)

        async def send(seed: int, policy: str = "policy", **made: Any) -> None:
            await driver.engine.update(world.adapter(make_adapter(base, seed, **made), seed, policy=policy))

        if known is not None:
            await send(1, **known)
        if message is None:
            await send(2, **new)
        else:
            before = dict(driver.engine.versions)
            with pytest.raises(PenstockError, match=message):
                await send(2, **new)
            assert driver.engine.versions == before

    asyncio.run(main())


def test_an_adapter_of_another_model_is_refused_by_name() -> None:
    async def main() -> None:
        world, driver = open_world(make_model("gpt_neox"))
        with pytest.raises(
            PenstockError, match="a layer model.layers.0.* which GPTNeoXForCausalLM does not have"
        ):
            await driver.engine.update(world.adapter(make_adapter(make_model(), 1), 1))

    asyncio.run(main())


@pytest.mark.parametrize("how", ["unmerged", "merged"])
def test_matrices_that_do_not_fit_leave_the_policy_on_the_adapter_before(how: str) -> None:
    base = make_model("llama")
    good, bad = (make_adapter(base, seed) for seed in (1, 2))
    narrow = "model.layers.1.self_attn.o_proj.lora_A.weight"
    bad.tensors[narrow] = bad.tensors[narrow][:, :-4].contiguous()

    async def main() -> None:
        world, driver = open_world(base, adapters=how)
        await driver.engine.update(world.adapter(good, 1))
        with pytest.raises(
            PenstockError, match=r"model.layers.1.self_attn.o_proj .* got A \(4, 28\), B \(32, 4\)"
        ):
            await driver.engine.update(world.adapter(bad, 2))
        await driver.start(ask("a", PROMPT, max_tokens=8, temperature=0.0))
        await driver.drain()
        check_answer(driver, "a", good.model)
        assert driver.versions("a") == [1] * 8

    asyncio.run(main())


@pytest.mark.parametrize(
    "transport", ["shared_memory", "filesystem", "http", "in_process", "in_process_staged"]
)
def test_adapters_come_by_any_transport(transport: str, tmp_path: Path) -> None:
    base = make_model("llama")
    adapters = {version: make_adapter(base, version) for version in (1, 2, 3)}
    at = Rendezvous(tmp_path, token="secret")
    options = Publishing(selection="adapter", base=0, adapter=adapters[1].spec)
    publisher = make_publisher(transport, adapters[1].tensors, options, at)

    async def main() -> None:
        engine = make_engine(copy.deepcopy(base), receiver=AnyReceiver(at), max_adapters=1)
        driver = Driver(engine)
        for version, adapter in adapters.items():
            publisher.snapshot(version, adapter.tensors)
            receipt = await engine.update(publisher.describe(version))
            assert (receipt.version, receipt.stage_s > receipt.stall_s) == (version, True)
            publisher.release(version)
            await driver.start(ask(str(version), PROMPT, max_tokens=4, temperature=0.0))
            await driver.drain()
            check_answer(driver, str(version), adapter.model)
        await engine.close()

    try:
        asyncio.run(main())
    finally:
        publisher.close()


class Held(InProcessReceiver):
    """Loads when it is told to."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self.entered, self.may_go = threading.Event(), threading.Event()

    def load(self, staged: Staged, tensors: Mapping[str, torch.Tensor]) -> Verification:
        self.entered.set()
        assert self.may_go.wait(timeout=60)
        return super().load(staged, tensors)


def test_generation_goes_on_while_an_adapter_is_loaded() -> None:
    base = make_model("llama")
    first, second = (make_adapter(base, seed) for seed in (1, 2))

    async def main() -> None:
        world, driver = open_world(base)
        held = Held(world.exchange)
        driver.engine._updates._receiver = held
        held.may_go.set()
        await driver.engine.update(world.adapter(first, 1))
        held.may_go.clear()
        held.entered.clear()
        await driver.start(ask("a", PROMPT, max_tokens=9, temperature=0.0))
        updating = asyncio.create_task(driver.engine.update(world.adapter(second, 2)))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(held.entered.wait, 60)
        for _ in range(4):
            await driver.step()
        held.may_go.set()
        await updating
        await driver.drain()
        assert driver.versions("a") == [1] * 4 + [2] * 5

    asyncio.run(main())


def test_an_update_that_is_cancelled_while_it_loads_leaves_its_place_free() -> None:
    base = make_model("llama")
    first, second = (make_adapter(base, seed) for seed in (1, 2))

    async def main() -> None:
        world, driver = open_world(base)
        held = Held(world.exchange)
        driver.engine._updates._receiver = held
        for _ in range(3):  # more often than there are places
            updating = asyncio.create_task(driver.engine.update(world.adapter(first, 1)))
            await asyncio.sleep(0)
            assert await asyncio.to_thread(held.entered.wait, 60)
            updating.cancel()
            held.may_go.set()
            await asyncio.gather(updating, return_exceptions=True)
            assert updating.cancelled()
            await asyncio.get_running_loop().run_in_executor(
                None, lambda: None
            )  # the thread is done, or another was
            held.entered.clear()
            held.may_go.clear()  # or the next one would be over before it is cancelled
        held.may_go.set()
        assert driver.engine.versions == {"policy": 0}
        await driver.engine.update(world.adapter(second, 2))
        await driver.start(ask("a", PROMPT, max_tokens=4, temperature=0.0))
        await driver.drain()
        check_answer(driver, "a", second.model)

    asyncio.run(main())
