"""Adapters on the engine's GPU path: rows of several policies in one step, and updates between two steps."""

import asyncio
from functools import partial

import pytest
import torch

from tests.triton_device import DEVICE, device_path  # noqa: F401 (a fixture)

from penstock.engines.embedded.model_preparation import compile_layers  # isort: skip
from penstock.engines.embedded.adapters.unmerged import UnmergedAdapters
from penstock.engines.embedded.cuda import device_attention
from penstock.engines.embedded.cuda.device_slots import DeviceSlots
from penstock.engines.embedded.cuda.weight_swap import Gate
from penstock.engines.embedded.joined_projections import join_projections
from penstock.models import attention
from tests.engines.contract import ask
from tests.engines.embedded.adapters import test_policy_adapters as policy_adapters
from tests.engines.embedded.adapters.peft_models import ATTENTION, MLP, make_adapter
from tests.engines.embedded.adapters.test_policy_adapters import PROMPT, check_answer, three_policies
from tests.engines.embedded.cuda.test_device_attention import Averages, compile_with
from tests.engines.embedded.test_exact import generate
from tests.engines.embedded.test_swaps import replay
from tests.engines.embedded.tiny import make_model

open_world = partial(policy_adapters.open_world, device=DEVICE)


@pytest.mark.full
@pytest.mark.parametrize("targets", [ATTENTION, MLP, ["q_proj", "v_proj", "down_proj"]])
def test_joined_projections_take_the_adapters_of_their_members(targets):
    base = make_model("qwen2")
    adapter = make_adapter(base, 1, targets=targets)

    async def main():
        world, driver = open_world(base, window=4)
        await driver.engine.update(world.adapter(adapter, 1))
        await driver.start(ask("a", PROMPT, max_tokens=5, temperature=0.0))
        await driver.drain()
        check_answer(driver, "a", adapter.model)
        assert driver.output("a") != generate(base, PROMPT, 5)

    asyncio.run(main())


@pytest.mark.full
def test_several_policies_and_the_base_answer_in_one_batch():
    base = make_model("llama")
    adapters = three_policies(base)
    models = {name: adapter.model for name, adapter in adapters.items()} | {"base": base}

    async def main():
        world, driver = open_world(base, max_adapters=3, versions={"policy": 0, "base": 0}, window=3)
        for version, (policy, adapter) in enumerate(adapters.items(), start=1):
            await driver.engine.update(world.adapter(adapter, version, policy=policy))
        for policy in models:
            await driver.start(ask(policy, PROMPT, max_tokens=5, temperature=0.0, policy=policy))
        await driver.drain()
        for version, (policy, model) in enumerate(models.items(), start=1):
            check_answer(driver, policy, model)
            assert driver.versions(policy) == [version % 4] * 5
        assert driver.engine.newest_version("b") == 2

    asyncio.run(main())


@pytest.mark.full
def test_a_policy_moves_to_its_new_adapter_within_a_window():
    """What is queued goes on with the new adapter from its next step on, and labels say where that was."""
    base = make_model("llama")
    first, second, other = (make_adapter(base, seed, targets=ATTENTION) for seed in (1, 2, 3))

    async def main():
        world, driver = open_world(base, max_adapters=2, window=4)
        engine = driver.engine
        await engine.update(world.adapter(first, 1))
        await engine.update(world.adapter(other, 1, policy="b"))
        for policy in ("policy", "b"):
            await driver.start(ask(policy, PROMPT, max_tokens=9, temperature=0.0, policy=policy))
        for _ in range(2):
            await driver.step()
        await engine.update(world.adapter(second, 2))
        await driver.drain()
        assert driver.versions("b") == [1] * 9
        check_answer(driver, "b", other.model)
        versions = driver.versions("policy")
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}
        before = versions.count(1)
        assert driver.output("policy")[:before] == generate(first.model, PROMPT, 9)[:before]
        assert engine.newest_version() == 2
        await driver.start(ask("new", PROMPT, max_tokens=4, temperature=0.0))
        await driver.drain()
        check_answer(driver, "new", second.model)

    asyncio.run(main())


def test_a_merged_adapter_runs_through_joined_weights():
    base = make_model("qwen2")
    adapter = make_adapter(base, 1, use_dora=True)

    async def main():
        world, driver = open_world(base, window=4)
        await driver.engine.update(world.adapter(adapter, 1))
        await driver.start(ask("a", PROMPT, max_tokens=5, temperature=0.0))
        await driver.drain()
        check_answer(driver, "a", adapter.model)

    asyncio.run(main())


def test_one_projection_of_a_family_alone_has_its_adapter_too():
    base = make_model("llama")
    adapter = make_adapter(base, 1, targets=["v_proj"])

    async def main():
        world, driver = open_world(base)
        await driver.engine.update(world.adapter(adapter, 1))
        layer = driver.engine._runner.model.model.layers[0].self_attn.v_proj
        states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        driver.engine._stepper.device.slots.begin_prompts(
            ["policy"], torch.zeros(3, dtype=torch.int64).numpy()
        )
        with torch.inference_mode():
            found = layer(states)
            wanted = adapter.model.to(DEVICE).base_model.model.model.layers[0].self_attn.v_proj(states)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)

    asyncio.run(main())


def test_one_compiled_graph_serves_all_layers_lengths_and_adapters(monkeypatch):
    """What differs from pass to pass, which adapter a row has, is nothing that compiled code sees."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, counter, device = make_model("qwen2").to(DEVICE), CompileCounter(), torch.device(DEVICE)
    attention.register()
    model.set_attn_implementation(attention.IMPLEMENTATION)
    attention.attach(model, device_attention.DeviceAttention())
    current = device_attention.CurrentPass(Averages())
    pools = {layer: torch.zeros(1, 1, 2, 16, device=device) for layer in range(3)}
    device_attention.attach_pools(model, pools, current)
    join_projections(model)
    slots = DeviceSlots(Gate(device, {"policy": 0, "b": 0}), max_rows=32, num_slots=2, device=device)
    layers = [name for name, _ in model.named_modules() if name.endswith("_proj")]
    adapters = UnmergedAdapters(model, slots, max_adapters=1, max_rank=4)
    adapters.expect(layers, 4)
    slots.assign("b", 2)
    slots.scale(2, 0.5)
    for stack, _ in adapters._stacks.values():
        for matrices in (stack.a, stack.b):
            matrices.copy_(torch.randn(matrices.shape, generator=torch.Generator().manual_seed(0)))

    def logits(policies):
        ids = torch.arange(len(policies), device=device)[None]
        slots.begin_prompts(policies, torch.arange(len(policies)).numpy())
        return model(input_ids=ids, position_ids=ids, use_cache=False).logits

    mixed = ["policy", "b", "b"] * 3
    with torch.no_grad():
        plain, expected = logits(["policy"] * 9), logits(mixed)
        assert (plain - expected).abs().max() > 0.1
        monkeypatch.setattr("torch.nn.Module.compile", lambda layer, **options: compile_with(layer, counter))
        compile_layers(model, 3)
        torch.testing.assert_close(logits(mixed), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits(["policy"] * 9), plain, atol=1e-4, rtol=1e-4)
        logits(["b"] * 5)
    assert counter.frame_count == 3  # one for all layers, and one each for rotary embedding and last norm


class Versions:
    """The models of one policy, by version; 0 is the base."""

    def __init__(self, base, adapters):
        self.models = {0: base} | {version: adapter.model for version, adapter in adapters.items()}

    def model(self, version):
        return self.models[version]


@pytest.mark.skipif(DEVICE != "cuda", reason="without a GPU nothing is in flight")
@pytest.mark.parametrize("how", ["off", "on"], ids=["plain", "compiled"])
def test_a_gpu_moves_policies_between_two_steps_of_what_is_queued(how):
    base, window, count = make_model("qwen2"), 40, 100
    mine = {version: make_adapter(base, version) for version in (1, 2, 3, 4)}
    other = make_adapter(base, 9)

    async def main():
        world, driver = open_world(base, max_adapters=2, window=window, compile=how)
        engine = driver.engine
        await engine.update(world.adapter(mine[1], 1))
        await engine.update(world.adapter(other, 1, policy="b"))
        for policy in ("policy", "b"):
            await driver.start(ask(policy, [4, 5, 6], max_tokens=count, seed=1, policy=policy))
        await driver.step()  # the prompts
        for version in (2, 3, 4):
            await driver.step()
            receipt = await engine.update(world.adapter(mine[version], version))
            assert 0 < receipt.stall_s < 0.1
        await driver.drain()
        versions = driver.versions("policy")
        assert (len(versions), versions) == (count, sorted(versions))
        assert 1 < versions.count(1) <= window  # not all of the first window
        assert driver.versions("b") == [1] * count
        for policy, models in (("policy", Versions(base, mine)), ("b", Versions(base, {1: other}))):
            implied = replay(models, [4, 5, 6], driver.output(policy), driver.versions(policy), set())
            torch.testing.assert_close(driver.logprobs(policy), implied, atol=1e-3, rtol=0)

    asyncio.run(main())


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are captured on a GPU")
def test_after_many_updates_in_bf16_an_engine_is_bitwise_one_that_started_with_the_last():
    base = make_model("qwen2").bfloat16()
    adapters = [make_adapter(base, seed, rank=16) for seed in range(20)]

    async def answers(updates):
        world, driver = open_world(base, window=8)
        for version, adapter in updates:
            await driver.engine.update(world.adapter(adapter, version))
        for number in range(4):
            await driver.start(ask(str(number), [number, 5, 6], max_tokens=30, seed=number))
        await driver.drain()
        return [(driver.output(str(n)), driver.logprobs(str(n)).tolist()) for n in range(4)]

    many = asyncio.run(answers(list(enumerate(adapters, start=1))))
    assert many == asyncio.run(answers([(20, adapters[-1])]))
