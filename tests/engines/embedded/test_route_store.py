"""Every token that an engine has computed comes with the experts that computed it, under any schedule."""

import asyncio
import copy
import logging
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.route_store import RouteStore
from penstock.errors import UserError
from penstock.models.routing import Recording, Replay, find_routers
from penstock.records import (
    AnswerSoFar,
    GenerateRequest,
    Interrupt,
    Parent,
    RoutingRef,
    RoutingShape,
    since_restart,
)
from penstock.records.blobs import routes_within
from penstock.records.routing_records import fetch_routes, no_routes, store_routes
from penstock.records.sampling_masks import fetch_mask
from tests.engines.contract import ask
from tests.engines.embedded.test_exact import first_tie, play_move
from tests.engines.embedded.test_interrupts import update
from tests.engines.embedded.test_swaps import any_engine
from tests.engines.embedded.tiny import Driver, SeededWeights, make_engine, make_model

FAMILY = "gpt_oss"
SHAPE = RoutingShape(family="GptOssForCausalLM", num_layers=3, num_experts=4, top_k=2)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def refs_of(driver: Driver, name: str) -> tuple[RoutingRef, ...]:
    """Where the routes of all tokens of a finished request are, those that its parent has sent among them."""
    own = (chunk.routing for chunk in since_restart(driver.chunks[name]))
    return (*driver.requests[name].routing, *(ref for ref in own if ref is not None))


def with_routes_of_parent(driver: Driver, request: GenerateRequest) -> GenerateRequest:
    """It records routes, and asks only for those that a finished parent has not sent."""
    known: tuple[RoutingRef, ...] = ()
    if request.parent is not None and request.parent.id in driver.finished():
        size = min(request.parent.keep, len(request.token_ids) - 1)
        known = routes_within(refs_of(driver, request.parent.id), 0, size)
    start = known[-1].end if known else 0
    return msgspec.structs.replace(request, record_routing=True, routing_start=start, routing=known)


class RoutesDriver(Driver):
    """Asks for routes; a fork asks for what its parent has not sent."""

    async def start(self, request: GenerateRequest) -> None:
        await super().start(with_routes_of_parent(self, request))

    def routes(self, name: str) -> np.ndarray:
        """Of all tokens of a finished request, those that its parent has sent among them."""
        return np.concatenate([fetch_routes(self.engine.blobs, ref) for ref in refs_of(self, name)])

    def tokens(self, name: str) -> list[int]:
        output = [int(token) for chunk in since_restart(self.chunks[name]) for token in chunk.token_ids]
        return [*self.requests[name].token_ids.tolist(), *output]


class RecordingDriver(RoutesDriver):
    """Remembers the routes of every pass that a token was drawn from."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(engine)
        self.drawn: dict[str, dict[int, np.ndarray]] = {}
        store, forward = engine._runner.routes, engine._runner.forward
        assert store is not None

        def remembering(batch: Any) -> torch.Tensor:
            logits = forward(batch)
            for seq, start, count in batch.spans:
                last = start + count - 1
                if last == seq.num_tokens - 1:
                    slot = (
                        seq.blocks[last // store._block_size] * store._block_size + last % store._block_size
                    )
                    for each in (seq, *seq.followers):
                        self.drawn.setdefault(each.request.id, {})[last] = store._tokens[slot].copy()
            return logits

        engine._runner.forward = remembering  # type: ignore[method-assign]

    def routes(self, name: str) -> np.ndarray:
        (ref,) = [chunk.routing for chunk in since_restart(self.chunks[name]) if chunk.routing is not None]
        assert (ref.start, ref.shape) == (self.requests[name].routing_start, self.engine.routing)
        return super().routes(name)


def plain_routes(model: nn.Module, tokens: list[int], replayed: np.ndarray | None = None) -> np.ndarray:
    """Those of one forward pass, whose first tokens are computed with the experts of `replayed`."""
    ids = torch.tensor([tokens])
    routers = find_routers(model, lambda: model(ids[:, :1]))
    assert routers is not None
    routers.watch()
    choices = None
    if replayed is not None:
        rows = np.zeros((len(tokens), *replayed.shape[1:]), dtype=np.int64)
        rows[: len(replayed)] = replayed
        known = torch.arange(len(tokens)) < len(replayed)
        choices = Replay(torch.from_numpy(rows).transpose(0, 1), known)
    recording = Recording(routers.shape.num_layers, choices)
    with routers.observed_by(recording), torch.no_grad():
        model(ids)
    return torch.stack([each for each in recording.ids if each is not None], dim=1).numpy()


def check_all_rows(driver: RecordingDriver) -> None:
    """One for every token but the last, and those that tokens were drawn from are those of the drawing passes."""
    for name in driver.finished():
        rows, tokens = driver.routes(name), driver.tokens(name)
        assert len(rows) == len(tokens) - 1
        own = [at for at in sorted(driver.drawn[name]) if at < len(rows)]
        assert own[-1] == len(rows) - 1
        assert len(own) >= len(tokens) - driver.requests[name].token_ids.size
        for at in own:
            assert rows[at].tolist() == driver.drawn[name][at].tolist(), (name, at)


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_schedule_sends_the_routes_of_a_plain_forward(data: st.DataObject) -> None:
    reference = make_model(FAMILY)

    async def main() -> None:
        engine = make_engine(
            copy.deepcopy(reference),
            kv_tokens=data.draw(st.sampled_from([64, 96, 400]), label="cache"),
            block_size=data.draw(st.sampled_from([1, 4, 16]), label="block"),
            max_batch=data.draw(st.integers(1, 8), label="batch"),
            prefill_chunk=data.draw(st.sampled_from([1, 5, 64]), label="chunk"),
            prefix_cache=data.draw(st.booleans(), label="prefix cache"),
        )
        driver = RecordingDriver(engine)
        for _ in range(data.draw(st.integers(1, 8), label="moves")):
            await play_move(driver, data)
        await driver.drain()
        check_all_rows(driver)
        for name in driver.finished():
            tokens = driver.tokens(name)
            sure = first_tie(reference, tokens)
            got, want = driver.routes(name)[:sure], plain_routes(reference, tokens)[:-1][:sure]
            assert np.array_equal(np.sort(got), np.sort(want))

    asyncio.run(main())


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_updates_in_flight_lose_no_row(data: st.DataObject) -> None:
    """Under any interrupt a token keeps the experts of the pass that drew the next one."""
    weights = SeededWeights(FAMILY)

    async def main() -> None:
        engine = any_engine(weights, data, resume_kv=data.draw(st.sampled_from(["keep", "recompute"])))
        driver = RecordingDriver(engine)
        for _ in range(data.draw(st.integers(1, 7), label="moves")):
            await play_move(driver, data)
            if data.draw(st.booleans(), label="update"):
                await update(driver, data.draw(st.sampled_from(get_args(Interrupt)), label="interrupt"))
        await driver.drain()
        check_all_rows(driver)

    asyncio.run(main())


def test_what_is_computed_again_with_new_weights_keeps_the_experts_that_sampled() -> None:
    weights = SeededWeights(FAMILY)

    async def main() -> None:
        driver = RecordingDriver(make_engine(copy.deepcopy(weights.model(0)), receiver=weights))
        await driver.start(ask("a", PROMPT, max_tokens=12, seed=1))
        for _ in range(6):
            await driver.step()
        await update(driver, "inflight_recompute")
        await driver.drain()
        check_all_rows(driver)
        old, live = (plain_routes(weights.model(version), driver.tokens("a"))[:-1] for version in (0, 1))
        known = len(PROMPT) + 5
        assert np.array_equal(driver.routes("a")[:known], old[:known])
        assert not np.array_equal(old[:known], live[:known])
        # The rest was chosen by the new weights, after a context that was computed with the experts of before.
        assert np.array_equal(
            driver.routes("a"), plain_routes(weights.model(1), driver.tokens("a"), old[:known])[:-1]
        )

    asyncio.run(main())


def test_a_later_turn_sends_new_rows_only() -> None:
    async def main() -> None:
        driver = RecordingDriver(make_engine(make_model(FAMILY)))
        await driver.start(ask("a", PROMPT, max_tokens=6, seed=1))
        await driver.drain()
        tokens = driver.tokens("a")
        await driver.start(ask("b", [*tokens, 7, 7], parent=Parent(id="a", keep=17), max_tokens=4, seed=2))
        await driver.drain()
        (ref,) = [chunk.routing for chunk in driver.chunks["b"] if chunk.routing is not None]
        assert (ref.start, ref.end) == (16, 22)  # the first turn's last token was not computed by it
        assert ref.blob.num_bytes == 6 * SHAPE.token_bytes == 6 * 3 * 2
        assert np.array_equal(driver.routes("b"), plain_routes(make_model(FAMILY), driver.tokens("b"))[:-1])

    asyncio.run(main())


def test_nobody_gets_routes_who_did_not_ask() -> None:
    async def main() -> None:
        driver = Driver(make_engine(make_model(FAMILY)))
        await driver.start(ask("a", PROMPT, max_tokens=3))
        await driver.drain()
        assert driver.chunks["a"][-1].routing is None

    asyncio.run(main())


@pytest.mark.parametrize(("family", "setting"), [("gpt_oss", "off"), ("llama", "auto")])
def test_nothing_is_recorded_when_off_or_dense(family: str, setting: str) -> None:
    async def main() -> None:
        engine = make_engine(make_model(family), record_routing=setting)
        driver = Driver(engine)
        await driver.start(ask("a", PROMPT, max_tokens=3, record_routing=True))
        await driver.drain()
        assert driver.chunks["a"][-1].routing is None
        assert "routing" not in (await engine.report()).capabilities

    asyncio.run(main())


def test_recording_a_dense_model_is_refused_when_it_is_asked_for() -> None:
    with pytest.raises(
        UserError, match=r"record_routing=on needs a model with experts, and LlamaForCausalLM has"
    ):
        make_engine(make_model("llama"), record_routing="on")


def test_a_family_that_does_not_fit_is_said_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(FAMILY)
    model.config.num_local_experts = 5  # no router chooses among five
    with caplog.at_level(logging.WARNING, logger="penstock"):
        make_engine(copy.deepcopy(model))
    assert "engine.record_routing=auto is off: GptOssForCausalLM's choice of experts can't be" in caplog.text
    with pytest.raises(UserError, match="GptOssForCausalLM's choice of experts can't be recorded"):
        make_engine(model, record_routing="on")


def test_blocks_are_copied_with_their_routes() -> None:
    store = RouteStore(SHAPE, num_blocks=4, block_size=2)
    ids = [torch.full((2, 2), layer) for layer in range(3)]
    store.write(torch.tensor([2, 3]), ids)
    store.copy_blocks([(1, 3), (0, 2)])
    assert store._tokens[6:8].tolist() == store._tokens[2:4].tolist() == [[[0, 0], [1, 1], [2, 2]]] * 2
    assert not store._tokens[4:6].any()


def test_an_answer_that_another_engine_goes_on_with_keeps_masks_and_routes() -> None:
    """Of the part that was made, in pieces as they were stored; of the rest, as if one engine had made all."""
    options = {"seed": 5, "top_k": 4, "record_sampling_mask": True, "record_routing": True, "max_tokens": 9}

    async def main() -> None:
        whole = make_engine(make_model(FAMILY))
        driver = Driver(whole)
        await driver.start(ask("whole", PROMPT, record_every=3, chunk_tokens=3, **options))
        await driver.drain()
        kept, last = driver.chunks["whole"][:2], driver.chunks["whole"][2]
        answer = AnswerSoFar(driver.requests["whole"], records_routing=True)
        for chunk in kept:
            answer.add(chunk)
        request = answer.hand_on(resumes=True).request
        assert (request.num_resumed, request.routing_start) == (6, len(PROMPT) + 5)
        other = Driver(make_engine(make_model(FAMILY)))
        await other.start(request)
        await other.drain()
        (rest,) = other.chunks["whole"]
        assert rest.token_ids.tolist() == last.token_ids.tolist()
        assert rest.sampling_mask is not None
        assert rest.routing is not None
        assert last.sampling_mask is not None
        assert last.routing is not None
        assert (rest.sampling_mask.start, rest.routing.start, rest.routing.end) == (6, 16, 19)
        assert rest.routing.blob.key.endswith("whole.6.routes")
        again = fetch_mask(other.engine.blobs, rest.sampling_mask)
        assert again.words.tolist() == fetch_mask(whole.blobs, last.sampling_mask).words.tolist()
        one_rows = fetch_routes(whole.blobs, last.routing)
        assert fetch_routes(other.engine.blobs, rest.routing).tolist() == one_rows.tolist()

    asyncio.run(main())


def test_a_resumed_answer_that_begins_again_sends_all_of_its_routes() -> None:
    """Those of its prompt came with chunks that are void now."""
    weights = SeededWeights(FAMILY)

    async def main() -> None:
        engine = make_engine(copy.deepcopy(weights.model(0)), receiver=weights)
        shape, options = engine.routing, {"max_tokens": 9, "record_routing": True}
        assert shape is not None
        known = store_routes(engine.blobs, "s/known", no_routes(shape, len(PROMPT) + 1), shape, start=0)
        driver = Driver(engine)
        resumed = {"num_resumed": 2, "routing_start": known.end, "routing": (known,)}
        await driver.start(msgspec.structs.replace(ask("a", [*PROMPT, 1, 2], **options), **resumed))
        for _ in range(3):
            await driver.step()
        await update(driver, "abort_retry")
        await driver.drain()
        chunks = since_restart(driver.chunks["a"])
        assert sum(len(chunk.token_ids) for chunk in chunks) == 9
        (ref,) = (chunk.routing for chunk in chunks if chunk.routing is not None)
        assert (ref.start, ref.end) == (0, len(PROMPT) + 8)
        assert fetch_routes(engine.blobs, ref)[: len(PROMPT)].any()

    asyncio.run(main())
