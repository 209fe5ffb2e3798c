import asyncio
import copy

import pytest
import torch

from penstock.engines.embedded.adapters.adapted_linear import AdaptedLinear, detach_stacks
from penstock.engines.embedded.adapters.row_slots import HostSlots
from penstock.engines.embedded.adapters.unmerged import UnmergedAdapters
from penstock.models.lora_targets import LoraConfig, target_layers
from tests.engines.contract import ask
from tests.engines.embedded.adapters.peft_models import ATTENTION, World, make_adapter
from tests.engines.embedded.adapters.test_policy_adapters import PROMPT, check_answer, open_world
from tests.engines.embedded.tiny import make_model


class Opened:
    """Adapters beside a tiny model, filled by hand."""

    def __init__(self, max_adapters=2):
        self.base = make_model("llama")
        self.world = World()
        self.adapters = UnmergedAdapters(
            copy.deepcopy(self.base), HostSlots(torch.device("cpu")), max_adapters=max_adapters, max_rank=8
        )

    def update(self, seed, policy="policy", **options):
        return self.world.adapter(make_adapter(self.base, seed, **options), seed, policy=policy)

    def send(self, update):
        if not self.adapters.has_room(update):
            self.adapters.make_room(update)
        place = self.adapters.open(update)
        self.world.receiver.load(self.world.receiver.stage(update), place.tensors)()
        self.adapters.settle(update, place)
        return place


def test_updates_of_a_policy_take_turns_in_two_places() -> None:
    opened = Opened(max_adapters=1)
    places = [opened.send(opened.update(seed)) for seed in (1, 2, 3, 4)]
    assert [place.slot for place in places] == [1, 2, 1, 2]
    assert places[0] is places[2]  # the very same tensors, so that a receiver can prepare


def test_what_lies_in_the_stack_is_what_was_published_whatever_came_after() -> None:
    opened = Opened()
    made = {
        "policy": make_adapter(opened.base, 1, rank=2, targets=ATTENTION),
        "b": make_adapter(opened.base, 2, rank=6),
    }
    for version, (policy, adapter) in enumerate(made.items(), start=1):
        opened.send(
            opened.world.adapter(adapter, version, policy=policy)
        )  # the second one makes the stacks grow
    for policy, adapter in made.items():
        live = opened.adapters.live_tensors(policy)
        assert live.keys() == adapter.tensors.keys()
        assert all(torch.equal(live[name], tensor) for name, tensor in adapter.tensors.items())


def test_a_slot_holds_nothing_of_the_adapter_that_was_there_before() -> None:
    opened = Opened(max_adapters=1)
    for seed, targets in ((1, "all-linear"), (2, ATTENTION), (3, ATTENTION)):
        place = opened.send(opened.update(seed, targets=targets))
    stack, part = opened.adapters._stacks["model.layers.0.mlp.down_proj"]
    assert place.slot == 1
    assert not any(matrix.any() for matrix in stack.matrices(1, part, 4))


def test_a_place_that_was_abandoned_is_filled_anew() -> None:
    opened = Opened(max_adapters=1)
    update = opened.update(1)
    opened.adapters.make_room(update)
    for _ in range(3):
        opened.adapters.abandon(opened.adapters.open(update))
    assert opened.send(update).slot in (1, 2)
    assert opened.adapters.policies == ("policy",)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
def test_room_that_was_made_before_is_enough(targets) -> None:
    base = make_model("qwen2")
    adapter = make_adapter(base, 1, targets=targets if isinstance(targets, str) else list(targets))

    async def main() -> None:
        world, driver = open_world(base)
        engine = driver.engine
        engine.expect_adapter(target_layers(engine._runner.model, LoraConfig(rank=4, targets=targets)), 4)
        update = world.adapter(adapter, 1)
        assert engine._adapters.serving(update, engine.versions).has_room(update)
        await driver.start(ask("base", PROMPT, max_tokens=4, temperature=0.0))
        await driver.drain()
        check_answer(driver, "base", base)
        await engine.update(update)
        await driver.start(ask("a", PROMPT, max_tokens=4, temperature=0.0))
        await driver.drain()
        check_answer(driver, "a", adapter.model)

    asyncio.run(main())


def test_the_next_engine_finds_the_layers_as_they_were() -> None:
    opened = Opened()
    opened.send(opened.update(1))
    model = opened.adapters._model
    assert any(isinstance(module, AdaptedLinear) for module in model.modules())
    detach_stacks(model)
    assert not any(isinstance(module, AdaptedLinear) for module in model.modules())
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, opened.base(ids).logits)
