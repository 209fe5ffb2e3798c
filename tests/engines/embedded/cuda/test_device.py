"""The engine's GPU path: launched ahead, read later, and exact. Without a GPU the same code runs its kernels
under Triton's interpreter and calls the steps that it would capture."""

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.triton_device import DEVICE, device_path  # noqa: F401 (a fixture)

from penstock.engines.embedded.model_runner import ModelRunner  # isort: skip
from penstock.engines.embedded.model_preparation import keep_logits_in_float32
from penstock.errors import EngineLost, FingerprintMismatch
from penstock.records.interfaces import Engine, Staged
from tests.engines.contract import EngineContract, ask, interrupt_of, update_to
from tests.engines.embedded.test_exact import check_against_plain_forwards, plain_table, play_move
from tests.engines.embedded.test_interrupts import (
    answers_across,
    check_labels,
    play_with_interrupts,
)
from tests.engines.embedded.test_swaps import Shadow, any_engine, play_with_swaps, replay
from tests.engines.embedded.tiny import (
    Driver,
    NoWeights,
    SeededWeights,
    make_engine,
    make_model,
    serve,
)


class TestContract(EngineContract):
    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        async with serve(make_model().to(DEVICE), max_context=64, window=1) as engine:
            yield engine


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_oss"])
@settings(
    max_examples=2 if DEVICE == "cpu" else 6,  # the interpreter is slow
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_schedule_equals_a_plain_forward(family, data):
    """Arrivals, groups, forks, cancellations and a cache so small that it preempts, in windows."""
    reference = make_model(family)

    async def main():
        engine = make_engine(
            copy.deepcopy(reference).to(DEVICE),
            kv_tokens=data.draw(st.sampled_from([64, 96, 400]), label="cache"),
            block_size=data.draw(st.sampled_from([4, 16]), label="block"),
            max_batch=data.draw(st.integers(1, 6), label="batch"),
            prefill_chunk=data.draw(st.sampled_from([5, 64]), label="chunk"),
            window=data.draw(st.sampled_from([1, 3, 8]), label="window"),
            keep_finished=data.draw(st.integers(0, 4), label="kept"),
        )
        driver = Driver(engine)
        for _ in range(data.draw(st.integers(1, 5), label="moves")):
            await play_move(driver, data)
        await driver.drain()
        check_against_plain_forwards(driver, reference)
        driver.check_nothing_is_held()

    asyncio.run(main())


@pytest.mark.parametrize("rebuilt", [set(), {2}], ids=["kept", "rebuilt"])
def test_labels_explain_every_token_across_swaps(rebuilt):
    weights = SeededWeights("llama")
    prompts = [[5, 6, 7, 8, 9], [1, 2, 3]]

    async def main():
        driver = Driver(make_engine(copy.deepcopy(weights.model(0)).to(DEVICE), receiver=weights, window=2))
        for number, prompt in enumerate(prompts):
            await driver.start(ask(str(number), prompt, max_tokens=14 + number, seed=number))
        for version in (1, 2):
            for _ in range(3):
                await driver.step()
            await driver.engine.update(update_to(version), interrupt_of(version in rebuilt))
        await driver.drain()
        for number, prompt in enumerate(prompts):
            versions = driver.versions(str(number))
            assert sorted(set(versions)) == [0, 1, 2]
            output, recorded = driver.output(str(number)), driver.logprobs(str(number))
            expected = replay(weights, prompt, output, versions, rebuilt)
            torch.testing.assert_close(recorded, expected, atol=1e-4, rtol=0)
            shifted = replay(weights, prompt, output, [versions[0], *versions[:-1]], rebuilt)
            assert (recorded - shifted).abs().max() > 1e-2

    asyncio.run(main())


@pytest.mark.full
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}], ids=["whole", "top-p"])
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(cut):
    reference = make_model()

    async def outputs(company, special=False, **options):
        driver = Driver(make_engine(copy.deepcopy(reference).to(DEVICE), **options))
        for number in range(company):
            penalty = {"repetition_penalty": 1.2} if special else {}
            await driver.start(ask(f"x{number}", [number, 3, 5], max_tokens=2 + number, **penalty))
        for number in range(2):
            await driver.start(ask(f"s{number}", [8, number, 1], max_tokens=6, seed=number, **cut))
            await driver.step()
        await driver.drain()
        return [driver.output(f"s{number}") for number in range(2)]

    alone = asyncio.run(outputs(0))
    assert alone == asyncio.run(outputs(2, special=True, window=3))
    if not cut:
        assert alone == asyncio.run(outputs(3, kv_tokens=32, prefill_chunk=2))
    assert alone[0] != alone[1]


def test_stop_tokens_end_a_sequence_within_a_window():
    reference = make_model()

    async def main():
        driver = Driver(make_engine(copy.deepcopy(reference).to(DEVICE), window=8))
        await driver.start(ask("free", [3, 1, 4], max_tokens=12, seed=1))
        await driver.drain()
        free = driver.output("free")
        stop = next(token for at, token in enumerate(free) if at >= 3 and token not in free[:at])
        await driver.start(ask("stopped", [3, 1, 4], max_tokens=12, seed=1, stop_token_ids=(stop,)))
        await driver.drain()
        assert driver.output("stopped") == free[: free.index(stop) + 1]
        assert driver.chunks["stopped"][-1].finish_reason == "stop"

    asyncio.run(main())


def test_truncated_draws_record_what_was_kept_and_their_logprob():
    reference = make_model()
    cuts = [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8}, {}]

    async def main():
        driver = Driver(make_engine(copy.deepcopy(reference).to(DEVICE), window=3))
        for number, cut in enumerate(cuts):
            await driver.start(
                ask(
                    str(number),
                    [7, number],
                    max_tokens=3 + number,
                    seed=number,
                    record_sampling_mask=True,
                    **cut,
                )
            )
        await driver.drain()
        for number, cut in enumerate(cuts):
            output = driver.output(str(number))
            rows = driver.masks(str(number))
            with torch.no_grad():
                table = reference(torch.tensor([[7, number, *output]])).logits[0, 1:-1]
            for at, (token, kept) in enumerate(zip(output, rows, strict=True)):
                if not cut:
                    assert len(kept) == 0
                    continue
                assert token in kept
                if cut == {"top_k": 5}:
                    assert sorted(kept) == sorted(table[at].topk(5).indices.tolist())
                scores = table[at][torch.tensor(kept).long()]
                expected = float(table[at, token] - scores.logsumexp(0))
                assert abs(float(driver.logprobs(str(number))[at]) - expected) < 1e-4

    asyncio.run(main())


def test_rows_move_together_when_the_batch_shrinks():
    """Seven sequences, of which one outlives the others: its row moves to the front, its tokens stay right."""
    reference = make_model()

    async def main():
        driver = Driver(make_engine(copy.deepcopy(reference).to(DEVICE), window=2, max_batch=8))
        for number in range(7):
            await driver.start(ask(str(number), [number, 2], max_tokens=3 if number < 6 else 14, seed=number))
        await driver.drain()
        assert driver.engine._stepper.device.graphs.bucket(1) == 1
        kinds = {kind.rows for kind in driver.engine._stepper.device.graphs._known}
        assert {8, 1} <= kinds
        check_against_plain_forwards(driver, reference)

    asyncio.run(main())


def logprobs_with_cache(dtype, model, monkeypatch):
    """Of two requests, one of which goes on where the other's prompt was computed."""
    monkeypatch.setattr(ModelRunner, "_cache_dtype", lambda runner, config: dtype)

    async def main():
        driver = Driver(make_engine(copy.deepcopy(model).to(DEVICE), window=3, prefill_chunk=5))
        assert next(iter(driver.engine._runner.cache.pools.values())).dtype == dtype
        for number in range(2):
            await driver.start(ask(str(number), [2, 3, 4, 5, 6, 7, 8, number], max_tokens=5, seed=number))
        await driver.drain()
        return torch.stack([driver.logprobs(str(number)) for number in range(2)])

    return asyncio.run(main())


def test_an_8_bit_cache_is_close(monkeypatch):
    exact = logprobs_with_cache(torch.float32, make_model(), monkeypatch)
    close = logprobs_with_cache(torch.float8_e4m3fn, make_model(), monkeypatch)
    assert 1e-5 < float((exact[:, 0] - close[:, 0]).abs().max()) < 0.3


def test_keys_and_values_too_large_for_8_bits_are_clipped(monkeypatch):
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0] *= 2000
    assert torch.isfinite(logprobs_with_cache(torch.float8_e4m3fn, model, monkeypatch)).all()


def test_after_many_swaps_an_engine_is_one_that_began_with_the_last_weights():
    """To the last bit; and in bf16 on a GPU it is as near to float32 as a plain bf16 forward pass is."""
    swaps, dtype = (100, torch.bfloat16) if DEVICE == "cuda" else (8, torch.float32)
    weights = SeededWeights("qwen2")
    prompt = [4, 5, 6, 7]

    def driver_of(version):
        model = copy.deepcopy(weights.model(version)).to(DEVICE, dtype)
        return Driver(make_engine(model, receiver=weights, window=2))

    async def answer(driver):
        await driver.start(ask("last", prompt, max_tokens=8, seed=1))
        await driver.drain()
        return driver.output("last"), driver.logprobs("last")

    async def main():
        driver = driver_of(0)
        for version in range(1, swaps + 1):
            weights.models[version] = weights.model(version % 3)
            await driver.start(ask(str(version), [version % 61, 2, 3], max_tokens=2, seed=version))
            await driver.step()
            await driver.engine.update(update_to(version))
        await driver.drain()  # alone, as in the fresh engine: the size of a batch rounds differently
        output, logprobs = await answer(driver)
        assert set(driver.versions("last")) == {swaps}
        output_of_fresh, logprobs_of_fresh = await answer(driver_of(swaps))
        assert output == output_of_fresh
        assert torch.equal(logprobs, logprobs_of_fresh)
        table = plain_table(weights.model(swaps), prompt, output)
        rounded = copy.deepcopy(weights.model(swaps)).to(DEVICE, dtype)
        with torch.no_grad():
            logits = rounded(torch.tensor([prompt + output], device=DEVICE)).logits[0, len(prompt) - 1 : -1]
        bound = 1e-4 + 2 * (torch.log_softmax(logits.float().cpu(), dim=-1) - table).abs().max()
        expected = table.gather(1, torch.tensor(output)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, atol=float(bound), rtol=0)

    asyncio.run(main())


def test_logits_in_float32_are_drawn_from_as_they_are():
    """In bf16 on a GPU; on a CPU the model is in float32, and nothing changes. Layers add nothing here, so that
    only the head could round."""
    model = make_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.mul_(4)
    model = model.to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    plain = copy.deepcopy(model)
    keep_logits_in_float32(plain)
    prompt = [4, 5, 6, 7]

    async def main():
        driver = Driver(make_engine(model, logits="float32", window=2))
        await driver.start(ask("one", prompt, max_tokens=16, seed=1))
        await driver.drain()
        output = driver.output("one")
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + output], device=DEVICE)).logits[0, len(prompt) - 1 : -1]
        assert logits.dtype == torch.float32

        def logprobs_of(logits):
            return torch.log_softmax(logits.cpu(), dim=-1).gather(1, torch.tensor(output)[:, None])[:, 0]

        expected = logprobs_of(logits)
        assert (logprobs_of(logits.bfloat16().float()) - expected).abs().max() > 1e-2  # rounding would show
        torch.testing.assert_close(driver.logprobs("one"), expected, atol=1e-3, rtol=0)

    asyncio.run(main())


def after_steps(engine, act):
    """On a CPU a launch is done when it returns: `act` runs after each step of it, when on a GPU an update that
    the host asks for would come in."""
    graphs = engine._stepper.device.graphs
    step = graphs._step

    def step_and_act(kind):
        step(kind)
        act()

    graphs._step = step_and_act


def update_now(engine, version):
    with pytest.raises(StopIteration):
        engine.update(update_to(version)).send(None)


class DeviceShadow(Shadow):
    """Computes every launch a second time, each with the weights that it is labelled with. For a CPU, where a
    launch is done when it returns."""

    def __init__(self, engine, weights):
        super().__init__(engine, weights)
        self.device = engine._stepper.device
        self.newest = {}
        """The last token that was drawn for a sequence, which the host may not know yet."""
        self._launch_prompts, self._launch_window = self.device.launch_prompts, self.device.launch_window
        self._forward_on_device = self.device.forward
        self.device.launch_prompts = self.launch_prompts
        self.device.launch_window = self.launch_window
        self.device.forward = self.forward_on_device

    def forward_on_device(self, batch):
        logits = self._forward_on_device(batch)
        self.check(batch, logits, int(self.device.gate.versions[0]))
        return logits

    def launch_prompts(self, batch, sequences, sources):
        self._launch_prompts(batch, sequences, sources)
        if sequences:
            launch = self.device._in_flight[-1]
            self.newest |= {seq: int(launch.tokens[row, 0]) for row, seq in enumerate(sequences)}

    def launch_window(self, sequences, steps, copies):
        self.copy(copies)
        begins = {
            seq: (
                seq.num_tokens + seq.num_pending - 1,
                self.newest[seq] if seq.num_pending else seq.tokens[-1],
            )
            for seq in sequences
        }
        self._launch_window(sequences, steps, copies)
        launch = self.device._in_flight[-1]
        for seq, row in zip(launch.sequences, launch.rows, strict=True):
            place, token = begins[seq]
            for step in range(min(int(launch.lengths[row]), seq.limit - 1 - place)):
                expected = self.compute(seq.blocks, [token], place + step, int(launch.versions[row, step]))
                token = int(launch.tokens[row, step])
                torch.testing.assert_close(
                    launch.logprobs[row, step].cpu(), expected[token], atol=1e-4, rtol=0
                )
            self.newest[seq] = token


@pytest.mark.full
@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU is not done when a launch returns")
@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_schedule_with_swaps_equals_a_replay(data):
    """Swaps within launches that are in flight and behind them, with prompts half computed and sequences
    preempted."""
    weights = SeededWeights("llama", prepared=True)

    async def main():
        engine = any_engine(weights, data, window=data.draw(st.sampled_from([1, 2, 5]), label="window"))
        DeviceShadow(engine, weights)
        often = data.draw(st.sampled_from([0, 3, 10]), label="updates within launches")

        def perhaps_update():
            if often and data.draw(st.integers(0, often), label="none") == 0:
                update_now(engine, engine.versions["policy"] + 1)

        after_steps(engine, perhaps_update)
        await play_with_swaps(engine, data)

    asyncio.run(main())


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU is not done when a launch returns")
@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_schedule_under_any_interrupts_equals_a_replay(data):
    weights = SeededWeights("llama", prepared=True)

    async def main():
        engine = any_engine(
            weights,
            data,
            window=data.draw(st.sampled_from([1, 2, 5]), label="window"),
            resume_kv=data.draw(st.sampled_from(["keep", "recompute"])),
        )
        DeviceShadow(engine, weights)
        await play_with_interrupts(engine, data, weights)

    asyncio.run(main())


@pytest.mark.full
@pytest.mark.parametrize(
    ("interrupt", "kv", "rebuilt", "of_one_version"),
    [
        ("abort_resume", "keep", set(), False),
        ("abort_resume", "recompute", {1}, False),
        ("abort_retry", "keep", set(), True),
        ("drain", "keep", set(), True),
    ],
)
def test_answers_in_launches_are_drained_resumed_or_tried_again(interrupt, kv, rebuilt, of_one_version):
    weights = SeededWeights("llama")

    async def main():
        model = copy.deepcopy(weights.model(0)).to(DEVICE)
        engine = make_engine(model, receiver=weights, window=2, max_batch=4, resume_kv=kv)
        driver, receipt = await answers_across(engine, interrupt, known=2, late=True)
        check_labels(driver, weights, rebuilt)
        assert driver.versions("late") == [1] * 5
        labels = [driver.versions(name) for name in "012"]
        assert all(len(versions) == 12 for versions in labels)
        if of_one_version:
            assert labels == [[int(interrupt == "abort_retry")] * 12] * 3
        else:
            assert all(versions[0] == 0 and versions[-1] == 1 for versions in labels)
        assert (receipt.recomputed_tokens > 0) == bool(rebuilt)
        assert (receipt.discarded_tokens > 0) == (interrupt == "abort_retry")

    asyncio.run(main())


def check_replay(driver, name, weights):
    """Logprobs are those of the versions that the tokens are labelled with."""
    prompt = driver.requests[name].token_ids.tolist()
    implied = replay(weights, prompt, driver.output(name), driver.versions(name), set())
    torch.testing.assert_close(driver.logprobs(name), implied, atol=1e-4, rtol=0)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU takes an update when it comes")
def test_new_weights_come_in_between_two_steps_of_a_launch():
    weights = SeededWeights("qwen2", prepared=True)

    async def main():
        engine = make_engine(copy.deepcopy(weights.model(0)), receiver=weights, window=5)
        driver = Driver(engine)
        await driver.start(ask("a", [4, 5, 6], max_tokens=12, seed=1))
        await driver.step()  # the prompt
        steps = itertools.count(1)
        after_steps(engine, lambda: update_now(engine, 1) if next(steps) == 2 else None)
        await driver.step()
        assert driver.chunks["a"] == []
        assert engine._stepper.device._in_flight[-1].versions[0].tolist() == [0, 0, 1, 1, 1]
        assert (engine.versions, engine.newest_version()) == ({"policy": 1}, 1)
        await driver.drain()
        assert driver.versions("a") == [0] * 3 + [1] * 9
        check_replay(driver, "a", weights)

    asyncio.run(main())


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU takes an update when it comes")
def test_every_row_is_labelled_with_the_version_of_its_own_policy():
    async def main():
        engine = make_engine(make_model(), versions={"policy": 3, "other": 8}, window=4)
        driver = Driver(engine)
        for name, policy in (("a", "policy"), ("b", "other"), ("c", "policy")):
            await driver.start(ask(name, [4, 5, 6], max_tokens=9, seed=1, policy=policy))
        await driver.step()  # the prompts
        steps, gate = itertools.count(1), engine._stepper.device.gate

        def swap():
            if next(steps) == 2:
                gate.let_in(lambda: lambda: 0.0, "other", 9, is_busy=False)

        after_steps(engine, swap)
        await driver.drain()
        assert driver.versions("a") == driver.versions("c") == [3] * 9
        assert driver.versions("b") == [8] * 3 + [9] * 6
        assert (engine.newest_version("policy"), engine.newest_version("other")) == (3, 9)

    asyncio.run(main())


class OnDevice(SeededWeights):
    """Weights that are already on the GPU, so that an update only queues copies."""

    def load(self, staged, tensors):
        there = self.there[staged.update.version]
        with torch.no_grad():
            torch._foreach_copy_(list(tensors.values()), [there[name] for name in tensors])
        return lambda: torch.cuda.current_stream().synchronize() or 0.0

    def put_there(self, versions):
        self.there = {
            version: {
                name: weight.detach().to(DEVICE) for name, weight in self.model(version).named_parameters()
            }
            for version in versions
        }
        weights = list(self.there[1].values())
        torch._foreach_copy_([weight.clone() for weight in weights], weights)  # loads the kernel


@pytest.mark.skipif(DEVICE != "cuda", reason="without a GPU nothing is in flight")
def test_a_gpu_stands_still_between_two_steps_for_new_weights():
    weights, window = OnDevice("qwen2", prepared=True), 40
    weights.put_there((1, 2, 3))

    async def main():
        engine = make_engine(copy.deepcopy(weights.model(0)).to(DEVICE), receiver=weights, window=window)
        engine.warm_up()
        driver = Driver(engine)
        await driver.start(ask("a", [4, 5, 6], max_tokens=100, seed=1))
        await driver.step()  # the prompt
        for version in (1, 2, 3):
            await driver.step()
            receipt = await engine.update(update_to(version))
            assert 0 < receipt.stall_s < 1
        await driver.drain()
        versions = driver.versions("a")
        assert len(versions) == 100
        assert versions == sorted(versions)
        assert 1 < versions.count(0) <= window  # not all of the first window
        check_replay(driver, "a", weights)

    asyncio.run(main())


@pytest.mark.skipif(DEVICE != "cpu", reason="copies from the host are not for a GPU that stands still")
@pytest.mark.parametrize("prepared", [False, True])
def test_what_is_in_flight_is_finished_only_for_updates_that_need_it(prepared):
    weights = SeededWeights("qwen2", prepared=prepared)

    async def main():
        driver = Driver(make_engine(copy.deepcopy(weights.model(0)), receiver=weights, window=2))
        await driver.start(ask("a", [4, 5, 6], max_tokens=12, seed=1))
        for _ in range(2):  # the prompt, and a window
            await driver.step()
        device = driver.engine._stepper.device
        assert device.num_in_flight == 2
        receipt = await driver.engine.update(update_to(1))
        assert receipt.stall_s > 0
        assert device.num_in_flight == (2 if prepared else 0)
        await driver.drain()
        assert driver.versions("a") == [0] * 3 + [1] * 9
        check_replay(driver, "a", weights)

    asyncio.run(main())


def test_nothing_drawn_with_weights_that_fail_to_verify_is_seen():
    weights = SeededWeights("qwen2")

    class Wrong(NoWeights):
        """The first update copies the weights of version 2, and says so only when it is asked."""

        fails = True

        def load(self, staged, tensors):
            weights.load(Staged(update_to(2)) if self.fails else staged, tensors)
            return self.verify

        def verify(self):
            if self.fails:
                raise FingerprintMismatch("not the trainer's")
            return 0.0

    async def main():
        receiver = Wrong()
        engine = make_engine(copy.deepcopy(weights.model(0)).to(DEVICE), receiver=receiver, window=2)
        driver = Driver(engine)
        await driver.start(ask("a", [4, 5, 6, 7, 8], max_tokens=12, seed=1, chunk_tokens=1))
        for _ in range(3):
            await driver.step()
        with pytest.raises(FingerprintMismatch):
            await engine.update(update_to(1))
        assert engine._stepper.device.num_in_flight == 0
        with pytest.raises(EngineLost, match="not the trainer's"):
            await driver.drain()
        assert set(driver.versions("a")) <= {0}
        assert engine._scheduler.cache.pool.num_free == engine._runner.num_blocks
        receiver.fails = False
        await engine.update(update_to(1))
        again = Driver(engine)
        await again.start(ask("b", [4, 5, 6, 7, 8], max_tokens=6, seed=1))
        await again.drain()
        check_replay(again, "b", weights)

    asyncio.run(main())


@pytest.mark.parametrize("steps_between", [0, 1])
def test_many_updates_leave_depth_and_masks_as_they_are(steps_between):
    """To the same weights: tokens and what truncation left of each do not depend on updates."""
    weights = SeededWeights("qwen2")

    async def answer(updates):
        driver = Driver(make_engine(copy.deepcopy(weights.model(0)).to(DEVICE), receiver=weights, window=1))
        await driver.start(ask("a", [4, 5, 6], max_tokens=11, seed=1, top_k=3, record_sampling_mask=True))
        for _ in range(2):
            await driver.step()
        for version in range(1, updates + 1):
            weights.models[version] = weights.model(0)
            await driver.engine.update(update_to(version))
            assert driver.engine._stepper.device.num_in_flight <= 2
            for _ in range(steps_between):
                await driver.step()
        await driver.drain()
        return driver.output("a"), driver.masks("a")

    output, masks = asyncio.run(answer(0))
    assert all(token in kept for token, kept in zip(output, masks, strict=True))
    assert asyncio.run(answer(4)) == (output, masks)


@pytest.mark.parametrize("rebuild", [False, True])
def test_an_update_while_the_cache_is_full_leaves_nobody_waiting(rebuild):
    weights = SeededWeights("qwen2")

    async def main():
        model = copy.deepcopy(weights.model(0)).to(DEVICE)
        engine = make_engine(model, receiver=weights, window=2, kv_tokens=24, max_batch=6, keep_finished=0)
        driver = Driver(engine)
        for number in range(3):
            await driver.start(ask(str(number), list(range(number, number + 8)), max_tokens=6, seed=number))
        for _ in range(2):
            await driver.step()
        assert engine._scheduler.num_waiting > 0
        await engine.update(update_to(1), interrupt_of(rebuild))
        for _ in range(200):
            await driver.step()
        assert len(driver.finished()) == 3

    asyncio.run(main())


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "gpt_oss"])
def test_compiled_layers_are_exact(family):
    """Prompts and decoding through the code that torch.compile makes: what it hands to our operator is what the
    layers meant."""
    reference = make_model(family)

    async def main():
        driver = Driver(make_engine(copy.deepcopy(reference).to(DEVICE), compile="on", max_batch=4, window=3))
        for number, prompt in enumerate(([3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5])):
            request = ask(
                str(number), prompt, max_tokens=5 + number, temperature=float(number > 0), seed=number
            )
            await driver.start(request)
        await driver.drain()
        assert len(driver.finished()) == 3
        check_against_plain_forwards(driver, reference)

    asyncio.run(main())


@pytest.mark.processes
@pytest.mark.full
def test_two_engines_of_one_process_share_compiled_code_and_do_not_mix():
    """Their steps alternate, prompts of one between windows of the other."""
    torch._dynamo.reset()  # all compiled modules share one list of graphs, which has a bound
    references = [make_model(seed=seed) for seed in (0, 1)]

    async def main():
        drivers = [
            Driver(make_engine(copy.deepcopy(model).to(DEVICE), compile="on", max_batch=2, window=2))
            for model in references
        ]
        for number, driver in enumerate(drivers):
            await driver.start(ask("a", [3, 1, 4][: 2 + number], max_tokens=7 + number, seed=number))
            await driver.step()
        for number, driver in enumerate(drivers):
            await driver.start(ask("b", [9, 2, 6, 5, 3], max_tokens=4, seed=number))
        for _ in range(20):
            for driver in drivers:
                await driver.step()
        for driver, reference in zip(drivers, references, strict=True):
            await driver.drain()
            assert driver.finished() == ["a", "b"]
            check_against_plain_forwards(driver, reference)

    asyncio.run(main())
