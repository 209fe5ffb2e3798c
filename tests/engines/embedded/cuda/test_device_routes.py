"""Routes that the passes on a GPU write themselves. Without a GPU the same code runs its kernels under Triton's
interpreter and calls the steps that it would capture."""

import asyncio
import copy
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.triton_device import DEVICE, device_path  # noqa: F401 (a fixture)

from penstock.engines.embedded.model_preparation import compile_layers  # isort: skip
from penstock.engines.embedded.cuda.device_attention import (
    CurrentPass,
    DeviceAttention,
    PromptPlan,
    attach_pools,
)
from penstock.engines.embedded.cuda.device_routes import DeviceRoutes
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.models import attention as interface
from penstock.models.routing import find_routers
from penstock.records import Interrupt, Parent
from tests.engines.contract import ask, interrupt_of, update_to
from tests.engines.embedded.cuda.test_device_attention import Averages, compile_with
from tests.engines.embedded.test_exact import first_tie, play_move
from tests.engines.embedded.test_interrupts import update
from tests.engines.embedded.test_route_store import (
    FAMILY,
    PROMPT,
    SHAPE,
    RoutesDriver,
    plain_routes,
)
from tests.engines.embedded.test_swaps import any_engine
from tests.engines.embedded.tiny import Driver, SeededWeights, make_engine, make_model
from tests.models.moe import moe_model
from tests.trainer.test_routing_exactness import MoeWeights, gaps_by_version

ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


class CheckedDriver(RoutesDriver):
    """Compares its routes with those of plain forward passes."""

    def check_all(self, reference: nn.Module) -> None:
        """A row for every token but the last, as a plain forward pass of these tokens chooses."""
        for name in self.finished():
            tokens = self.tokens(name)
            sure = first_tie(reference, tokens)
            got, want = self.routes(name), plain_routes(reference, tokens)[:-1]
            assert len(got) == len(want)
            assert np.array_equal(np.sort(got[:sure]), np.sort(want[:sure]))


class SpyingDriver(CheckedDriver):
    """Remembers the routes of every step that a token was drawn in: steps are called, where there are no graphs."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(engine)
        self.drawn: dict[str, dict[int, np.ndarray]] = {}
        device: Any = engine._stepper.device
        store, step, sample = engine._runner.routes, device.graphs._step, device._sample
        assert isinstance(store, DeviceRoutes)

        def note(seq: Any, place: int) -> None:
            size = store._block_size
            slot = seq.blocks[place // size] * size + place % size
            self.drawn.setdefault(seq.request.id, {})[place] = store._record[:, slot].numpy().copy()

        def stepping(kind: Any) -> None:
            places = device._buffers.ints[0].tolist()
            step(kind)
            for seq, row in device._rows.of.items():
                if places[row] // store._block_size < len(seq.blocks):
                    note(seq, places[row])

        def sampling(logits: torch.Tensor, sequences: Any, sources: Any) -> Any:
            for seq in sequences:
                note(seq, seq.num_tokens - 1)
            return sample(logits, sequences, sources)

        device.graphs._step, device._sample = stepping, sampling


@pytest.mark.full
@settings(
    max_examples=2 if DEVICE == "cpu" else 12,  # the interpreter is slow
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_schedule_sends_the_routes_of_a_plain_forward(data: st.DataObject) -> None:
    """Arrivals, groups, forks, cancellations and a cache so small that it preempts, in windows."""
    reference = make_model(FAMILY)

    async def main() -> None:
        engine = make_engine(
            copy.deepcopy(reference).to(DEVICE),
            kv_tokens=data.draw(st.sampled_from([64, 96, 400]), label="cache"),
            block_size=data.draw(st.sampled_from([4, 16]), label="block"),
            max_batch=data.draw(st.integers(1, 6), label="batch"),
            prefill_chunk=data.draw(st.sampled_from([5, 64]), label="chunk"),
            window=data.draw(st.sampled_from([1, 3, 8]), label="window"),
            keep_finished=data.draw(st.integers(0, 4), label="kept"),
        )
        driver = CheckedDriver(engine)
        for _ in range(data.draw(st.integers(1, 5), label="moves")):
            await play_move(driver, data)
        await driver.drain()
        driver.check_all(reference)

    asyncio.run(main())


@pytest.mark.full
@pytest.mark.skipif(DEVICE != "cpu", reason="steps that are graphs can't be watched")
@settings(
    max_examples=3,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_updates_in_flight_lose_no_row(data: st.DataObject) -> None:
    """Under any interrupt a token keeps the experts of the step that drew the next one."""
    weights = SeededWeights(FAMILY)

    async def main() -> None:
        engine = any_engine(weights, data, resume_kv=data.draw(st.sampled_from(["keep", "recompute"])))
        driver = SpyingDriver(engine)
        for _ in range(data.draw(st.integers(1, 5), label="moves")):
            await play_move(driver, data)
            if data.draw(st.booleans(), label="update"):
                await update(driver, data.draw(st.sampled_from(get_args(Interrupt)), label="interrupt"))
        await driver.drain()
        for name in driver.finished():
            rows, tokens = driver.routes(name), driver.tokens(name)
            assert len(rows) == len(tokens) - 1
            own = [at for at in sorted(driver.drawn[name]) if at < len(rows)]
            assert len(own) >= len(tokens) - driver.requests[name].token_ids.size
            for at in own:
                assert rows[at].tolist() == driver.drawn[name][at].tolist(), (name, at)

    asyncio.run(main())


@pytest.mark.parametrize("rebuilt", [False, True], ids=["kept", "computed again"])
def test_tokens_keep_the_experts_that_sampled_them_across_an_update(rebuilt: bool) -> None:
    weights = SeededWeights(FAMILY)

    async def main() -> None:
        model = copy.deepcopy(weights.model(0)).to(DEVICE)
        driver = CheckedDriver(make_engine(model, receiver=weights, window=2))
        await driver.start(ask("a", PROMPT, max_tokens=14, seed=1))
        for _ in range(4):
            await driver.step()
        await driver.engine.update(update_to(1), interrupt_of(rebuilt))
        await driver.drain()
        tokens, versions = driver.tokens("a"), driver.versions("a")
        known = len(PROMPT) - 1 + versions.index(1)  # the token that the first new one was drawn from
        assert known > len(PROMPT)
        old, new = (plain_routes(weights.model(version), tokens)[:-1] for version in (0, 1))
        assert np.array_equal(np.sort(driver.routes("a")[:known]), np.sort(old[:known]))
        assert not np.array_equal(old[:known], new[:known])
        if rebuilt:  # with the experts of before
            want = plain_routes(weights.model(1), tokens, old[:known])[:-1]
            assert np.array_equal(np.sort(driver.routes("a")), np.sort(want))

    asyncio.run(main())


@pytest.mark.full
@pytest.mark.parametrize(
    ("interrupt", "kv"),
    [
        ("inflight_recompute", "keep"),
        pytest.param("inflight", "keep", marks=ON_GPU),
        pytest.param("abort_resume", "recompute", marks=ON_GPU),
        pytest.param("abort_retry", "keep", marks=ON_GPU),
    ],
)
def test_one_pass_with_replay_gives_every_logprob_also_on_a_gpu(interrupt: Interrupt, kv: str) -> None:
    """Groups, a later turn, updates in flight and a sequence that is preempted after one, in float32."""
    weights = MoeWeights()

    async def main() -> Driver:
        model = copy.deepcopy(weights.model(0)).to(DEVICE)
        engine = make_engine(model, receiver=weights, window=2, prefill_chunk=7, resume_kv=kv)
        driver = CheckedDriver(engine)
        for turn in range(1 if DEVICE == "cpu" else 2):
            for number in range(2):
                context, parent = PROMPT, None
                if turn:
                    context = [*driver.tokens(f"{number}.0"), number, 7]
                    parent = Parent(id=f"{number}.0", keep=len(context) - 2)
                seed = 2 * turn + number
                await driver.start(ask(f"{number}.{turn}", context, parent=parent, max_tokens=14, seed=seed))
            for _ in range(5):
                await driver.step()
            await update(driver, interrupt)
            await driver.step()
            engine._stepper.drain()
            if engine._scheduler.running:
                engine._scheduler._preempt(engine._scheduler.running[-1])
            await driver.drain()
        return driver

    errors = torch.cat(list(gaps_by_version(asyncio.run(main()), weights).values()))
    assert float(errors[~errors.isnan()].max()) < (1e-5 if DEVICE == "cpu" else 1e-4)
    assert bool(errors.isnan().any()) == (interrupt == "inflight")


def test_a_later_turn_sends_new_rows_only() -> None:
    reference = make_model(FAMILY)

    async def main() -> None:
        driver = CheckedDriver(make_engine(copy.deepcopy(reference).to(DEVICE), window=4))
        await driver.start(ask("a", PROMPT, max_tokens=6, seed=1))
        await driver.drain()
        tokens = driver.tokens("a")
        await driver.start(ask("b", [*tokens, 7, 7], parent=Parent(id="a", keep=17), max_tokens=4, seed=2))
        await driver.drain()
        (ref,) = [chunk.routing for chunk in driver.chunks["b"] if chunk.routing is not None]
        assert (ref.start, ref.end) == (16, 22)  # the first turn's last token was not computed by it
        assert ref.blob.num_bytes == 6 * SHAPE.token_bytes == 6 * 3 * 2
        driver.check_all(reference)

    asyncio.run(main())


@pytest.mark.full
def test_penalties_make_passes_wait_and_lose_no_row() -> None:
    reference = make_model(FAMILY)

    async def main() -> None:
        driver = CheckedDriver(make_engine(copy.deepcopy(reference).to(DEVICE), window=3))
        await driver.start(ask("a", PROMPT, max_tokens=9, seed=1))
        await driver.step()
        await driver.start(ask("b", [5, 3], max_tokens=4, seed=2, repetition_penalty=1.3))
        await driver.drain()
        driver.check_all(reference)
        assert len(driver.routes("b")) == 5

    asyncio.run(main())


def test_blocks_are_copied_with_their_routes() -> None:
    model = make_model(FAMILY).to(DEVICE)
    one = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    routers = find_routers(model, lambda: model(input_ids=one))
    assert routers is not None
    store = DeviceRoutes(routers, num_blocks=3, block_size=2, device=torch.device(DEVICE))
    store._record.copy_(torch.arange(store._record.numel()).view_as(store._record))
    before = store._record.clone()
    store.copy_blocks([(1, 2), (0, 3)])
    assert torch.equal(store._record[:, 4:8], torch.cat([before[:, 2:4], before[:, :2]], dim=1))
    assert torch.equal(store._record[:, :4], before[:, :4])
    rows = store._read(np.array([5, 0]), in_order=True)
    assert rows.dtype == np.uint8
    assert np.array_equal(rows, before[:, [3, 0]].transpose(0, 1).cpu().numpy())


def test_one_compiled_graph_records_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts of any length, each layer into its own part of the record."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, counter = moe_model("olmoe").to(DEVICE), CompileCounter()
    model.set_experts_implementation("batched_mm")
    one = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    routers = find_routers(model, lambda: model(input_ids=one))
    assert routers is not None
    interface.register()
    model.set_attn_implementation(interface.IMPLEMENTATION)
    interface.attach(model, DeviceAttention())
    current = CurrentPass()
    pools = {layer: torch.full((1, 1, 2, 16), float(layer), device=DEVICE) for layer in range(3)}
    attach_pools(model, pools, current)
    store = DeviceRoutes(routers, num_blocks=8, block_size=4, device=torch.device(DEVICE))
    store.follow(current)
    monkeypatch.setattr("torch.nn.Module.compile", lambda layer, **options: compile_with(layer, counter))

    def recorded(length: int) -> torch.Tensor:
        store._record.zero_()
        current.plan = Slots(torch.arange(length, device=DEVICE) + 3)
        ids = torch.arange(length, device=DEVICE)[None]
        model(input_ids=ids, position_ids=ids, use_cache=False)
        return store._record[:, 3 : 3 + length].clone()

    with torch.no_grad():
        plain = {length: recorded(length) for length in (9, 4, 17)}
        compile_layers(model, 3)
        for length, want in plain.items():
            assert torch.equal(recorded(length), want)
    assert len({want.sum().item() for want in plain.values()}) == 3
    assert not torch.equal(plain[17][0], plain[17][1])
    assert counter.frame_count == 3  # one for all layers, and one each for rotary embedding and last norm


class Slots(Averages):
    """A plan of prompts whose tokens lie in these slots, with a simple attention."""

    def __init__(self, slots: torch.Tensor) -> None:
        super().__init__()
        self.slots = slots

    record = PromptPlan.record


@ON_GPU
@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_hold_the_experts_and_their_record(dtype: torch.dtype, compiled: str) -> None:
    torch._dynamo.reset()
    reference = moe_model("olmoe", hidden_size=128, intermediate_size=64, num_experts=16)

    async def main() -> None:
        model = copy.deepcopy(reference).to(DEVICE, dtype)
        engine = make_engine(model, window=4, max_batch=8, compile=compiled, prefill_chunk=64)
        driver = CheckedDriver(engine)
        for number in range(6):
            await driver.start(ask(str(number), [number, *PROMPT], max_tokens=12 + number, seed=number))
        await driver.drain()
        assert engine.uses_graphs
        same = []
        for name in driver.finished():
            got, want = driver.routes(name), plain_routes(reference, driver.tokens(name))[:-1]
            assert got.shape == want.shape
            same.append((np.sort(got) == np.sort(want)).mean())
        assert len(same) == 6
        assert min(same) > (0.999 if dtype == torch.float32 else 0.8)

    asyncio.run(main())
