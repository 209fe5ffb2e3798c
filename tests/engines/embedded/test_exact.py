"""Greedy tokens are those of `model.generate`, logprobs those of a plain forward, under any schedule."""

import asyncio
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.records import Parent
from tests.engines.contract import ask
from tests.engines.embedded.tiny import FAMILIES, VOCAB, Driver, make_engine, make_model

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8] * 23]


def generate(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [int(token) for token in output[0, len(prompt) :]]


def plain_table(model: nn.Module, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logprobs over the vocabulary at each output token, in one plain forward."""
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([prompt + output])).logits[0], dim=-1)
    return table[len(prompt) - 1 : -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family: str) -> None:
    reference = make_model(family)

    async def main() -> None:
        driver = Driver(make_engine(copy.deepcopy(reference), prefill_chunk=8))
        for number, prompt in enumerate(PROMPTS):
            await driver.start(ask(str(number), prompt, max_tokens=20 + number, temperature=0.0))
        await driver.drain()
        for number, prompt in enumerate(PROMPTS):
            output = driver.output(str(number))
            assert output == generate(reference, prompt, 20 + number)
            table = plain_table(reference, prompt, output)
            expected = table.gather(1, torch.tensor(output)[:, None])[:, 0]
            torch.testing.assert_close(driver.logprobs(str(number)), expected, atol=1e-4, rtol=0)

    asyncio.run(main())


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_schedule_equals_a_plain_forward(family: str, data: st.DataObject) -> None:
    run_any_schedule(make_model(family), data, most_moves=8)


def run_any_schedule(reference: nn.Module, data: st.DataObject, *, most_moves: int) -> None:
    """Arrivals, groups, shared prefixes, forks, cancellations and a cache so small that it preempts."""

    async def main() -> None:
        engine = make_engine(
            copy.deepcopy(reference),
            kv_tokens=data.draw(st.sampled_from([64, 96, 400]), label="cache"),
            block_size=data.draw(st.sampled_from([1, 4, 16]), label="block"),
            max_batch=data.draw(st.integers(1, 8), label="batch"),
            prefill_chunk=data.draw(st.sampled_from([1, 5, 64]), label="chunk"),
            prefix_cache=data.draw(st.booleans(), label="prefix cache"),
            keep_finished=data.draw(st.integers(0, 4), label="kept"),
        )
        driver = Driver(engine)
        for _ in range(data.draw(st.integers(1, most_moves), label="moves")):
            await play_move(driver, data)
        await driver.drain()
        check_against_plain_forwards(driver, reference)
        driver.check_nothing_is_held()

    asyncio.run(main())


async def play_move(driver: Driver, data: st.DataObject) -> None:
    count = len(driver.requests)
    move = data.draw(st.sampled_from(["add", "group", "fork", "cancel", "steps"]))
    options = {
        "max_tokens": data.draw(st.integers(1, 20)),
        "temperature": data.draw(st.sampled_from([0.0, 1.0])),
        "chunk_tokens": data.draw(st.integers(1, 5)),
        "seed": count,
    }
    if move in ("add", "group"):
        start = data.draw(st.integers(0, 2))
        prompt = [(start * 17 + 5 * n) % VOCAB for n in range(data.draw(st.integers(1, 40)))]
        for number in range(1 if move == "add" else 4):
            await driver.start(ask(f"r{count + number}", prompt, **{**options, "seed": count + number}))
    elif move == "fork" and driver.requests:
        parent = data.draw(st.sampled_from(sorted(driver.requests)))
        whole = [int(t) for t in driver.requests[parent].token_ids] + driver.output(parent)
        keep = data.draw(st.integers(1, len(whole)))
        prompt = [*whole[:keep], 9, 9][:44]
        await driver.start(ask(f"r{count}", prompt, parent=Parent(id=parent, keep=keep), **options))
    elif move == "cancel" and driver.running():
        await driver.cancel(data.draw(st.sampled_from(driver.running())))
    elif move == "steps":
        for _ in range(data.draw(st.integers(1, 12))):
            await driver.step()


def first_tie(model: nn.Module, tokens: list[int]) -> int:
    """The first place at which two experts are so close that rounding decides between them: from there on two
    right computations may differ."""
    places = [len(tokens)]

    def look(router: nn.Module, _: object, output: tuple[torch.Tensor, ...]) -> None:
        ordered = output[0].view(len(tokens), -1).sort(dim=-1, descending=True).values
        gaps = ordered[:, router.top_k - 1] - ordered[:, router.top_k]  # type: ignore[operator]
        places.extend(torch.nonzero(gaps < 1e-5).flatten().tolist())

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(look) for router in routers]
    if routers:
        with torch.no_grad():
            model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return min(places)


def check_against_plain_forwards(driver: Driver, reference: nn.Module) -> None:
    for name, request in driver.requests.items():
        output = driver.output(name)
        if not output:
            continue
        prompt = request.token_ids.tolist()
        table = plain_table(reference, prompt, output)
        expected = table.gather(1, torch.tensor(output)[:, None])[:, 0]
        sure = max(0, first_tie(reference, prompt + output) - len(prompt) + 1)
        torch.testing.assert_close(driver.logprobs(name)[:sure], expected[:sure], atol=1e-4, rtol=0)
        if request.sampling.temperature == 0:
            assert output[:sure] == table.argmax(dim=-1).tolist()[:sure]
        if name in driver.finished():
            assert len(output) == request.sampling.max_tokens


def test_experts_that_are_equally_likely_are_a_tie() -> None:
    model, tokens = make_model("gpt_oss"), [3, 1, 4, 1, 5, 9]
    assert first_tie(model, tokens) == len(tokens)
    assert first_tie(make_model("llama"), tokens) == len(tokens)
    with torch.no_grad():
        for parameter in model.model.layers[1].mlp.router.parameters():
            parameter.zero_()
    assert first_tie(model, tokens) == 0


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    reference = make_model()

    async def outputs(company: int, **options: int) -> list[list[int]]:
        driver = Driver(make_engine(copy.deepcopy(reference), **options))
        for number in range(company):
            await driver.start(ask(f"x{number}", [number, 3, 5], max_tokens=7 + number))
        for number in range(4):
            await driver.start(ask(f"s{number}", [8, number, 1], max_tokens=30, seed=number))
            await driver.step()
        await driver.drain()
        return [driver.output(f"s{number}") for number in range(4)]

    alone = asyncio.run(outputs(0))
    assert alone == asyncio.run(outputs(13))
    assert alone == asyncio.run(outputs(5, kv_tokens=48, prefill_chunk=2))
    assert len({tuple(tokens) for tokens in alone}) == 4


def test_a_fork_of_a_prefix_that_is_being_computed_copies_nothing_too_early() -> None:
    """Three requests of one pass: the second shares a block that the first fills in it, and the third wants half
    of that block, which is not there yet when blocks are copied."""
    reference, prompt = make_model(), [(5 * n) % VOCAB for n in range(10)]

    async def main() -> None:
        driver = Driver(make_engine(copy.deepcopy(reference), block_size=4))
        await driver.start(ask("a", prompt, max_tokens=2))
        await driver.start(ask("b", [*prompt[:7], 9, 9], max_tokens=4, parent=Parent(id="a", keep=7)))
        await driver.start(ask("c", [*prompt[:2], 9, 9], max_tokens=4, parent=Parent(id="b", keep=2)))
        await driver.drain()
        check_against_plain_forwards(driver, reference)

    asyncio.run(main())
