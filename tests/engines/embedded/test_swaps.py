"""New weights in mid-generation: every recorded logprob is explained by the recorded versions."""

import asyncio
import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.scheduler import Batch
from penstock.errors import EngineLost
from penstock.records.interfaces import Verification
from tests.engines.contract import ask, interrupt_of, update_to
from tests.engines.embedded.test_exact import play_move
from tests.engines.embedded.tiny import Driver, NoWeights, SeededWeights, make_engine


def feed(model: nn.Module, cache: DynamicCache, tokens: list[int]) -> torch.Tensor:
    """Logprobs after the last of `tokens`, whose keys are added to `cache`."""
    with torch.no_grad():
        output = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    return torch.log_softmax(output.logits[0, -1], dim=-1)


def replay(
    weights: SeededWeights, prompt: list[int], output: list[int], versions: list[int], rebuilt: set[int]
) -> torch.Tensor:
    """The logprobs that the labels imply: token i comes from the forward pass of `versions[i]`, which also
    computes the keys of whatever had none; a version in `rebuilt` computes all keys again."""
    cache, fed, logprobs = DynamicCache(), 0, []
    for number, (token, version) in enumerate(zip(output, versions, strict=True)):
        before = versions[number - 1] if number else version
        if any(before < swap <= version for swap in rebuilt):
            cache, fed = DynamicCache(), 0
        known = prompt + output[:number]
        logprobs.append(feed(weights.model(version), cache, known[fed:])[token])
        fed = len(known)
    return torch.stack(logprobs)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("rebuilt", [set(), {2}, {1, 2, 3}])
def test_labels_explain_every_token_and_shifted_ones_do_not(family: str, rebuilt: set[int]) -> None:
    weights = SeededWeights(family)
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [1, 2, 3]]

    async def main() -> None:
        driver = Driver(make_engine(copy.deepcopy(weights.model(0)), receiver=weights))
        for number, prompt in enumerate(prompts):
            await driver.start(ask(str(number), prompt, max_tokens=16 + number, seed=number))
        for version in (1, 2, 3):
            for _ in range(4):
                await driver.step()
            receipt = await driver.engine.update(update_to(version), interrupt_of(version in rebuilt))
            assert receipt.version == version
        await driver.drain()
        for number, prompt in enumerate(prompts):
            name = str(number)
            versions = driver.versions(name)
            assert versions == [0] * 4 + [1] * 4 + [2] * 4 + [3] * (4 + number)
            output, recorded = driver.output(name), driver.logprobs(name)
            expected = replay(weights, prompt, output, versions, rebuilt)
            torch.testing.assert_close(recorded, expected, atol=1e-4, rtol=0)
            shifted = replay(weights, prompt, output, [versions[0], *versions[:-1]], rebuilt)
            assert (recorded - shifted).abs().max() > 1e-2

    asyncio.run(main())


class Shadow:
    """Computes every span of an engine's passes a second time with transformers' own attention and caches,
    block by block, and keeps the logprobs that each pass must give."""

    def __init__(self, engine: EmbeddedEngine, weights: SeededWeights) -> None:
        self.engine = engine
        self.weights = weights
        self.memory: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._forward = engine._runner.forward
        engine._runner.forward = self.forward  # type: ignore[method-assign]

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = self._forward(batch)
        self.check(batch, logits, self.engine.versions["policy"])
        return logits

    def check(self, batch: Batch, logits: torch.Tensor, version: int) -> None:
        self.copy(batch.copies)
        row = 0
        for seq, first, count in batch.spans:
            expected = self.compute(seq.blocks, seq.tokens[first : first + count], first, version)
            if first + count == seq.num_tokens:
                actual = torch.log_softmax(logits[row], dim=-1)
                torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
                row += 1

    def copy(self, copies: list[tuple[int, int]]) -> None:
        before = dict(self.memory)
        for source, target in copies:
            for offset in range(self.engine.config.block_size):
                if (source, offset) in before:
                    self.memory[target, offset] = before[source, offset]

    def compute(self, blocks: list[int], tokens: list[int], first: int, version: int) -> torch.Tensor:
        """Logprobs after `tokens`, which stand at `first` and after it, in a sequence of these blocks."""
        size = self.engine.config.block_size
        slots = [(blocks[place // size], place % size) for place in range(first + len(tokens))]
        return self._compute(tokens, slots, first, self.weights.model(version))

    def _compute(
        self, tokens: list[int], slots: list[tuple[int, int]], first: int, model: nn.Module
    ) -> torch.Tensor:
        cache = DynamicCache()
        if first:
            past = [self.memory[slot] for slot in slots[:first]]
            for layer in range(len(past[0])):
                keys = torch.cat([each[layer][0] for each in past], dim=2)
                values = torch.cat([each[layer][1] for each in past], dim=2)
                cache.update(keys, values, layer)
        result = feed(model, cache, tokens)
        for place in range(first, len(slots)):
            self.memory[slots[place]] = [
                (layer.keys[:, :, place : place + 1], layer.values[:, :, place : place + 1])
                for layer in cache.layers
            ]
        return result


def drawn_settings(data: st.DataObject, *, least_batch: int = 1) -> dict[str, int]:
    """Small caches, small batches and cut prompts."""
    return {
        "kv_tokens": data.draw(st.sampled_from([64, 400]), label="cache"),
        "max_batch": data.draw(st.integers(least_batch, 6), label="batch"),
        "prefill_chunk": data.draw(st.sampled_from([5, 64]), label="chunk"),
        "keep_finished": data.draw(st.integers(0, 4), label="kept"),
    }


def any_engine(weights: SeededWeights, data: st.DataObject, **options: Any) -> EmbeddedEngine:
    model = copy.deepcopy(weights.model(0))
    return make_engine(model, receiver=weights, **drawn_settings(data), **options)


async def play_with_swaps(engine: EmbeddedEngine, data: st.DataObject) -> None:
    """Any moves with updates between them; afterwards labels never go back, and no block is lost."""
    driver = Driver(engine)
    for _ in range(data.draw(st.integers(1, 8), label="moves")):
        await play_move(driver, data)
        if data.draw(st.booleans(), label="swap"):
            rebuild = data.draw(st.booleans(), label="rebuild")
            await engine.update(update_to(engine.versions["policy"] + 1), interrupt_of(rebuild))
    await driver.drain()
    for name in driver.finished():
        versions = driver.versions(name)
        assert versions == sorted(versions)
    driver.check_nothing_is_held()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_any_schedule_with_swaps_equals_a_replay(family: str, data: st.DataObject) -> None:
    """Swaps between any two passes, also while a prompt is half computed or a sequence is preempted."""
    weights = SeededWeights(family)

    async def main() -> None:
        engine = any_engine(weights, data)
        Shadow(engine, weights)
        await play_with_swaps(engine, data)

    asyncio.run(main())


def test_a_failed_update_reaches_its_caller_and_every_request() -> None:
    class Torn(NoWeights):
        fails = True

        def load(self, staged: Any, tensors: Any) -> Verification:
            if self.fails:
                raise OSError("the bucket is gone")
            return lambda: 0.25

    async def main() -> None:
        receiver = Torn()
        driver = Driver(make_engine(SeededWeights("llama").model(0), receiver=receiver))
        await driver.start(ask("a", max_tokens=9))
        await driver.step()
        with pytest.raises(OSError, match="bucket"):
            await driver.engine.update(update_to(1))
        with pytest.raises(EngineLost, match="engine0 has failed: the bucket is gone"):
            await driver.drain()
        assert driver.engine.versions == {"policy": 0}
        with pytest.raises(EngineLost, match="engine0 has failed: the bucket is gone"):
            await anext(driver.engine.generate(ask("b")))
        receiver.fails = False
        receipt = await driver.engine.update(update_to(2))
        assert receipt.verify_s == 0.25
        assert receipt.stall_s >= 0
        driver = Driver(driver.engine)
        await driver.start(ask("c", max_tokens=3))
        await driver.drain()
        assert driver.versions("c") == [2, 2, 2]

    asyncio.run(main())
