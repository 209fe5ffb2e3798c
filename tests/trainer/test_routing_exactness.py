"""How close engine and trainer come when the trainer computes with the engine's experts."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache

from penstock.blob_stores import MemoryBlobs
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.scheduler import Batch
from penstock.models.routing import Recording, Replay, find_routers
from penstock.records import (
    AnswerSoFar,
    Interrupt,
    Parent,
    Sample,
    TrainSequence,
    joined_chunk,
    since_restart,
)
from penstock.records.interfaces import BlobStore
from penstock.records.routing_records import fetch_routes, store_routes
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.forward.packed_row import PackedRow
from tests.engines.contract import ask
from tests.engines.embedded.test_exact import play_move
from tests.engines.embedded.test_interrupts import update
from tests.engines.embedded.test_route_store import FAMILY, RecordingDriver, refs_of
from tests.engines.embedded.test_swaps import Shadow, any_engine
from tests.engines.embedded.tiny import Driver, SeededWeights, make_engine
from tests.models.moe import CONFIGS, VOCAB, moe_model
from tests.records.builders import make_sample
from tests.trainer.forward.test_row_routing import moved_by

COUNTS = {
    "qwen3-moe": "num_experts",
    "olmoe": "num_experts",
    "mixtral": "num_local_experts",
    "gpt-oss": "num_local_experts",
    "glm4-moe": "n_routed_experts",
    "deepseek-v3": "n_routed_experts",
}
PROMPT = 9


def wide_model(family: str, seed: int = 0) -> nn.Module:
    """Eight of 64 experts in each of six layers: choices that are often close."""
    return moe_model(family, seed, **{COUNTS[family]: 64, "num_experts_per_tok": 8, "num_hidden_layers": 6})


def prompts(count: int) -> list[list[int]]:
    return [[(7 * number + 3 * place) % VOCAB for place in range(PROMPT)] for number in range(count)]


class Sampled:
    """Sequences to train on, each with all of its routes."""

    def __init__(self, samples: Sequence[Sample], blobs: BlobStore) -> None:
        self.sequences = [
            TrainSequence(sample=sample, group=number, episode=0) for number, sample in enumerate(samples)
        ]
        self._blobs = blobs

    def row(self, policy: PackedModel) -> PackedRow | None:
        assert policy.routers is not None
        device = next(policy.model.parameters()).device
        return PackedRow.of(
            self.sequences, device, shared_prompts=True, blobs=self._blobs, routing=policy.routers.shape
        )


def by_engine(driver: Driver, names: Sequence[str] | None = None) -> Sampled:
    """What an engine was asked to draw, and has drawn to the end: all of it, or these requests."""

    def sample(name: str) -> Sample:
        request, chunks = driver.requests[name], since_restart(driver.chunks[name])
        size = len(request.token_ids)
        output, logprobs, versions = (
            np.concatenate([getattr(chunk, field) for chunk in chunks])
            for field in ("token_ids", "logprobs", "versions")
        )
        mixed = joined_chunk(chunks).mixed
        assert mixed is not None
        return Sample(
            token_ids=np.concatenate([request.token_ids, output]),
            loss_mask=np.arange(size + len(output)) >= size,
            logprobs=np.concatenate([np.zeros(size, np.float32), logprobs]),
            versions=np.concatenate([np.full(size, -1, np.int32), versions]),
            mixed=np.concatenate([np.zeros(size, np.bool_), mixed]),
            sampling=request.sampling,
            routing=refs_of(driver, name),
        )

    finished = driver.finished() if names is None else names
    drawn = [name for name in finished if driver.requests[name].sampling.temperature > 0]
    return Sampled([sample(name) for name in drawn], driver.engine.blobs)


def by_penstock(model: nn.Module, *, count: int, length: int) -> Sampled:
    driver = Driver(make_engine(copy.deepcopy(model), record_routing="on", kv_tokens=8192))

    async def main() -> None:
        for number, prompt in enumerate(prompts(count)):
            await driver.start(ask(str(number), prompt, max_tokens=length, seed=number, record_routing=True))
        await driver.drain()

    asyncio.run(main())
    return by_engine(driver)


@torch.no_grad()
def by_transformers(model: nn.Module, *, count: int, length: int) -> Sampled:
    """Decoded token by token with transformers' own attention and cache: it rounds otherwise than the trainer does,
    in every token."""
    decoder: Any = copy.deepcopy(model)
    routers = find_routers(decoder, lambda: decoder(input_ids=torch.zeros(1, 1, dtype=torch.long)))
    assert routers is not None
    routers.watch()
    cache, random = DynamicCache(config=decoder.config), torch.Generator().manual_seed(0)
    tokens, logprobs, routes = [torch.tensor(prompts(count))], [], []
    for _ in range(length):
        recording = Recording(routers.shape.num_layers)
        with routers.observed_by(recording):
            logits = decoder(input_ids=tokens[-1], past_key_values=cache, use_cache=True).logits[:, -1]
        chosen = torch.stack([ids for ids in recording.ids if ids is not None], dim=1)
        routes.append(chosen.view(count, -1, *chosen.shape[1:]))
        distribution = logits.float().log_softmax(-1)
        tokens.append(torch.multinomial(distribution.exp(), 1, generator=random))
        logprobs.append(distribution.gather(1, tokens[-1]))
    all_tokens, all_routes = torch.cat(tokens, 1).int().numpy(), torch.cat(routes, 1).numpy()
    all_logprobs = torch.cat([torch.zeros(count, PROMPT), *logprobs], dim=1).numpy()
    blobs, size = MemoryBlobs(), PROMPT + length
    samples = [
        make_sample(
            all_tokens[number],
            np.arange(size) >= PROMPT,
            logprobs=all_logprobs[number],
            routing=(store_routes(blobs, f"s/{number}", all_routes[number], routers.shape, start=0),),
        )
        for number in range(count)
    ]
    return Sampled(samples, blobs)


@torch.no_grad()
def gaps(model: nn.Module, sampled: Sampled, *, replays: bool) -> torch.Tensor:
    """|Δ logprob| of every sampled token between the engine and the trainer with this model."""
    policy = PackedModel(copy.deepcopy(model), chunk_tokens=1024)
    row = sampled.row(policy)
    assert row is not None
    return (policy(row, replays_routing=replays).logprobs - row.behaviour_logprobs).abs()


@torch.no_grad()
def flipped_tokens(model: nn.Module, sampled: Sampled) -> torch.Tensor:
    """Whether a live router of any layer would have chosen other experts where a token was drawn from."""
    policy = PackedModel(copy.deepcopy(model), chunk_tokens=1024)
    row = sampled.row(policy)
    assert row is not None and row.routing is not None
    live = policy.chosen(row)
    differs = live.sort(dim=2).values != row.routing.ids.to(live.dtype).sort(dim=2).values
    return differs.any(dim=2).any(dim=0)[row.rows]


@pytest.mark.parametrize("family", CONFIGS)
def test_in_float32_nothing_flips_and_replay_changes_nothing(family: str) -> None:
    model = moe_model(family)
    sampled = by_penstock(model, count=3, length=24)
    assert not bool(flipped_tokens(model, sampled).any())
    free, replayed = (gaps(model, sampled, replays=replays) for replays in (False, True))
    assert float((free - replayed).abs().max()) <= 1e-6
    assert float(replayed.max()) < 5e-5


@pytest.mark.parametrize("family", COUNTS)
def test_in_bfloat16_tokens_that_flipped_are_as_close_as_the_others(family: str) -> None:
    model = wide_model(family).to(torch.bfloat16)
    sampled = by_transformers(model, count=12, length=60)
    flipped = flipped_tokens(model, sampled)
    free, replayed = (gaps(model, sampled, replays=replays) for replays in (False, True))
    assert 100 < int(flipped.sum()) < 700
    assert float(replayed[flipped].mean()) <= 1.5 * float(replayed[~flipped].mean())
    assert float(replayed[flipped].mean()) < 0.7 * float(free[flipped].mean())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", COUNTS)
def test_on_a_gpu_the_engines_tokens_that_flipped_are_as_close_as_the_others(family: str) -> None:
    """Penstock's own pair in bfloat16: paged kernels in CUDA graphs against the packed forward pass."""
    model = wide_model(family).to("cuda", torch.bfloat16)
    sampled = by_penstock(model, count=12, length=100)
    flipped = flipped_tokens(model, sampled)
    free, replayed = (gaps(model, sampled, replays=replays) for replays in (False, True))
    assert 20 < int(flipped.sum()) < 1180
    assert float(replayed[flipped].mean()) <= 1.5 * float(replayed[~flipped].mean())
    assert float(replayed[flipped].mean()) < 0.7 * float(free[flipped].mean())


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("seed", range(3))
def test_replay_at_least_halves_the_gap_after_a_small_move(family: str, seed: int) -> None:
    model = wide_model(family, seed)
    sampled = by_transformers(model, count=6, length=60)
    moved = moved_by(model, 0.001)
    assert 20 < int(flipped_tokens(moved, sampled).sum()) < 300
    free, replayed = (gaps(moved, sampled, replays=replays) for replays in (False, True))
    assert float(replayed.mean()) <= float(free.mean()) / 2


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_row_is_replayed_under_any_schedule(data: st.DataObject) -> None:
    """Forks, prefix hits, preemption, and updates in flight under any interrupt."""
    weights = SeededWeights(FAMILY)

    async def main() -> Driver:
        engine = any_engine(weights, data, resume_kv=data.draw(st.sampled_from(["keep", "recompute"])))
        driver = RecordingDriver(engine)
        for _ in range(data.draw(st.integers(1, 8), label="moves")):
            await play_move(driver, data)
            if data.draw(st.booleans(), label="update"):
                await update(driver, data.draw(st.sampled_from(get_args(Interrupt)), label="interrupt"))
        await driver.drain()
        return driver

    check_all_replayed(asyncio.run(main()), weights.model(0))


def test_every_row_is_replayed_after_all_of_these_at_once() -> None:
    weights = SeededWeights(FAMILY)

    async def main() -> Driver:
        engine = make_engine(copy.deepcopy(weights.model(0)), receiver=weights, kv_tokens=64, block_size=4)
        driver = RecordingDriver(engine)
        preempted, keep = [], engine._scheduler._on_preempt
        engine._scheduler._on_preempt = lambda seq: (preempted.append(seq), keep(seq))[1]
        for number in range(4):
            await driver.start(ask(str(number), prompts(1)[0], max_tokens=20, seed=number))
        for _ in range(6):
            await driver.step()
        await update(driver, "inflight_recompute")
        await driver.drain()
        assert preempted
        begun = driver.tokens("0")[:15]
        await driver.start(ask("fork", [*begun, 5], parent=Parent(id="0", keep=15), max_tokens=6, seed=9))
        await driver.start(ask("again", begun, max_tokens=6, seed=10))
        await driver.drain()
        assert driver.requests["fork"].routing_start == 15
        return driver

    driver = asyncio.run(main())
    assert len(driver.finished()) == 6
    check_all_replayed(driver, weights.model(0))


def check_all_replayed(driver: Driver, model: nn.Module) -> None:
    policy = PackedModel(copy.deepcopy(model), chunk_tokens=1024)
    row = by_engine(driver).row(policy)
    if row is None:
        return
    with torch.no_grad():
        outputs = policy(row)
    assert row.routing is not None and outputs.routing is not None
    _, num_choices, num_replayed = outputs.routing.tolist()
    assert num_replayed == num_choices == row.routing.ids.shape[0] * row.input_ids.shape[1]


class MoeWeights(SeededWeights):
    """Versions that have nothing in common: routes of one are wrong for every other."""

    def __init__(self) -> None:
        super().__init__("qwen3-moe")

    def model(self, version: int) -> nn.Module:
        if version not in self.models:
            self.models[version] = moe_model(
                self.family, version, num_experts=32, num_experts_per_tok=4, num_hidden_layers=4
            )
        return self.models[version]


@torch.no_grad()
def gaps_by_version(driver: Driver, weights: SeededWeights) -> dict[str, torch.Tensor]:
    """|Δ logprob| of every token of every request, against one pass with replay and the weights of its version;
    NaN where keys and values of other weights were read, which no such pass computes."""
    found = {}
    for name in driver.finished():
        (sequence,) = by_engine(driver, [name]).sequences
        sample, errors = sequence.sample, torch.full((len(sequence.sample.token_ids),), torch.nan)
        for version in np.unique(sample.versions[sample.loss_mask]):
            policy = PackedModel(copy.deepcopy(weights.model(int(version))), chunk_tokens=1024)
            assert policy.routers is not None and sample.mixed is not None
            row = PackedRow.of([sequence], blobs=driver.engine.blobs, routing=policy.routers.shape)
            assert row is not None and row.routing is not None
            assert row.routing.num_known == row.input_ids.shape[1]
            gap = (policy(row).logprobs - row.behaviour_logprobs).abs()
            clean = torch.from_numpy(((sample.versions == version) & ~sample.mixed)[sample.loss_mask])
            errors[torch.from_numpy(sample.loss_mask)] = torch.where(
                clean, gap, errors[torch.from_numpy(sample.loss_mask)]
            )
        found[name] = errors[torch.from_numpy(sample.loss_mask)]
    return found


REBUILT = [
    ("drain", "keep"),
    ("abort_retry", "keep"),
    ("inflight_recompute", "keep"),
    ("abort_resume", "recompute"),
]
KEPT = [("inflight", "keep"), ("abort_resume", "keep")]


def played(
    weights: SeededWeights,
    interrupt: Interrupt,
    kv: str,
    *,
    preempts: bool,
    watch: Callable[[EmbeddedEngine], object] = lambda engine: None,
) -> Driver:
    """Updates in flight, groups, later turns whose parent's cache is there or gone, and sequences that lose theirs."""

    async def main() -> Driver:
        options = {"receiver": weights, "prefill_chunk": 7, "keep_finished": 2, "resume_kv": kv}
        engine = make_engine(copy.deepcopy(weights.model(0)), kv_tokens=52 if preempts else 400, **options)
        watch(engine)
        scheduler = engine._scheduler
        driver = RecordingDriver(engine)
        for turn in range(2):
            for number in range(4):
                context, parent = prompts(2)[number // 2], None
                if turn:
                    context = [*driver.tokens(f"{number}.0"), number, 7]
                    parent = Parent(id=f"{number}.0", keep=len(context) - 2)
                seed = 4 * turn + number
                await driver.start(ask(f"{number}.{turn}", context, parent=parent, max_tokens=20, seed=seed))
            for _ in range(2):
                for step in range(6):
                    await driver.step()
                    if preempts and step in (2, 4) and scheduler.running:
                        scheduler._preempt(scheduler.running[-1])
                await update(driver, interrupt)
            await driver.drain()
        return driver

    driver = asyncio.run(main())
    assert len(driver.finished()) == 8
    return driver


@pytest.mark.parametrize("preempts", [False, True], ids=["", "preempted"])
@pytest.mark.parametrize(("interrupt", "kv"), [*REBUILT, *KEPT])
def test_one_pass_with_replay_gives_every_logprob_whatever_was_computed_again(
    interrupt: Interrupt, kv: str, preempts: bool
) -> None:
    weights = MoeWeights()
    driver = played(weights, interrupt, kv, preempts=preempts)
    errors = torch.cat(list(gaps_by_version(driver, weights).values()))
    assert float(errors[~errors.isnan()].max()) < 1e-5
    if (interrupt, kv) in REBUILT:
        assert not bool(errors.isnan().any())
    else:
        assert 0 < int(errors.isnan().sum()) < len(errors)


class Later(Shadow):
    """Remembers the spans of every pass, and computes them again when all routes are on record: pass by pass, each
    with the weights of its version, behind the keys and values that lay there."""

    def __init__(self, engine: EmbeddedEngine, weights: SeededWeights) -> None:
        super().__init__(engine, weights)
        self.passes: list[tuple[list[tuple[int, int]], list[tuple[Any, ...]], int]] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        spans = [
            (
                [each.request.id for each in (seq, *seq.followers)],
                first,
                seq.tokens[first : first + count],
                list(seq.blocks),
                first + count == seq.num_tokens,
            )
            for seq, first, count in batch.spans
        ]
        self.passes.append((list(batch.copies), spans, self.engine.versions["policy"]))
        return self._forward(batch)

    @torch.no_grad()
    def logprobs(self, routes: dict[str, np.ndarray]) -> dict[tuple[str, int], torch.Tensor]:
        """Of every token that could be drawn at a place of a request."""
        found, size, models = {}, self.engine.config.block_size, dict[int, nn.Module]()
        for copies, spans, version in self.passes:
            self.copy(copies)
            model = models.setdefault(version, copy.deepcopy(self.weights.model(version)))
            for names, first, tokens, blocks, is_drawn in spans:
                end = first + len(tokens)
                slots = [(blocks[place // size], place % size) for place in range(end)]
                again = replaying(model, routes[names[0]][first:end])
                logprobs = self._compute(tokens, slots, first, again)
                found |= {(name, end): logprobs for name in names if is_drawn}
        return found


def replaying(model: nn.Module, routes: np.ndarray) -> Any:
    """The model, whose routers are answered with these routes."""
    decoder: Any = model
    routers = find_routers(decoder, lambda: decoder(input_ids=torch.zeros(1, 1, dtype=torch.long)))
    assert routers is not None
    routers.watch()
    ids = torch.from_numpy(routes.astype(np.int64)).transpose(0, 1)

    def run(tokens: torch.Tensor, **options: Any) -> Any:
        known = torch.ones(ids.shape[1], dtype=torch.bool)
        with routers.observed_by(Replay(ids, known, all_known=True)):
            return decoder(tokens, **options)

    return run


@pytest.mark.full
@pytest.mark.parametrize("preempts", [False, True], ids=["", "preempted"])
@pytest.mark.parametrize(("interrupt", "kv"), KEPT)
def test_pass_by_pass_with_replay_gives_every_logprob_also_behind_older_keys(
    interrupt: Interrupt, kv: str, preempts: bool
) -> None:
    """Tokens that read keys of several versions, which no single pass computes."""
    weights, later = MoeWeights(), list[Later]()
    driver = played(
        weights, interrupt, kv, preempts=preempts, watch=lambda engine: later.append(Later(engine, weights))
    )
    routes = {
        name: np.concatenate([fetch_routes(driver.engine.blobs, ref) for ref in refs_of(driver, name)])
        for name in driver.finished()
    }
    expected, num_mixed = later[0].logprobs(routes), 0
    for name in driver.finished():
        start, recorded = len(driver.requests[name].token_ids), driver.logprobs(name)
        again = [expected[name, start + place][token] for place, token in enumerate(driver.output(name))]
        assert float((torch.stack(again) - recorded).abs().max()) < 1e-5
        num_mixed += sum(driver.mixed(name))
    assert num_mixed > 0


@pytest.mark.parametrize("has_blocks", [False, True], ids=["", "same_tokens_in_the_cache"])
def test_an_answer_that_another_engine_resumes_is_computed_again_with_its_recorded_experts(
    has_blocks: bool,
) -> None:
    """The other engine serves newer weights, and has nothing of it but its tokens and where their routes are. Blocks
    of the same tokens that other experts have computed are not shared."""
    weights, blobs = MoeWeights(), MemoryBlobs()

    async def main() -> Driver:
        first = Driver(make_engine(copy.deepcopy(weights.model(0)), blobs=blobs))
        asked = ask(
            "a", prompts(1)[0], max_tokens=24, seed=1, record_routing=True, record_every=4, chunk_tokens=4
        )
        await first.start(asked)
        for _ in range(10):
            await first.step()
        answer = AnswerSoFar(asked, records_routing=True)
        for chunk in first.chunks["a"]:
            answer.add(chunk)
        handed_on = answer.hand_on(resumes=True).request
        assert handed_on.num_resumed == 8
        second = Driver(make_engine(copy.deepcopy(weights.model(1)), versions={"policy": 1}, blobs=blobs))
        if has_blocks:
            await second.start(ask("live", handed_on.token_ids.tolist(), max_tokens=1))
            await second.drain()
            del second.chunks["live"]
        await second.start(handed_on)
        await second.drain()
        second.requests["a"] = asked
        second.chunks["a"] = [*first.chunks["a"], *second.chunks["a"]]
        return second

    driver = asyncio.run(main())
    assert driver.versions("a") == [0] * 8 + [1] * 16
    errors = gaps_by_version(driver, weights)["a"]
    assert float(errors.max()) < 1e-5
    assert not bool(errors.isnan().any())
