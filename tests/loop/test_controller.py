"""The controller in virtual time: the staleness promises at any speed ratio, and no deadlock."""

import asyncio
import itertools
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.root import PenstockConfig
from penstock.engines.engine_pool import EnginePool
from penstock.errors import BaseMissing, ScoringFailed, UserError
from penstock.loop.admission import GateState, StepGroups, Ticket
from penstock.loop.attempt_records import RunResumed
from penstock.loop.attempts import Attempt
from penstock.loop.controller import Controller
from penstock.loop.group_log import MemoryGroupLog
from penstock.loop.history import HistoryState
from penstock.loop.resume import BroughtBack, LostGroup, Resume
from penstock.loop.spans import with_numbers
from penstock.observe.event_stream import EventStream
from penstock.observe.events import AnyEvent, Drop, SampleEvent, Span, StepEvent, UpdateEvent
from penstock.observe.readers import MemoryReader
from penstock.observe.run_state import RunState
from penstock.planner.simulation import (
    SimulatedEngine,
    SimulatedScorer,
    SimulatedTokenizer,
    SimulatedTrainer,
)
from penstock.planner.virtual_time import Deadlock, run_in_virtual_time
from penstock.records import Episode, Group, Interrupt, Score, Task, UpdateReceipt, WeightUpdate
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.episode_runner import LocalEpisodes
from penstock.rollout.workflow import as_workflow
from penstock.run.assembly import Parts, build_controller


class Tasks:
    def __init__(self) -> None:
        self.issued: list[str] = []
        self.returned: list[str] = []
        self._queue: list[Task] = []

    def next(self) -> Task:
        task = self._queue.pop(0) if self._queue else Task(id=f"t{len(self.issued)}", prompt="p")
        self.issued.append(task.id)
        return task

    @property
    def num_taken(self) -> int:
        return 0

    def put_back(self, task: Task) -> None:
        self.returned.append(task.id)
        self._queue.append(task)

    def task(self, task_id: str) -> Task:
        return Task(id=task_id, prompt="p")


@dataclass
class World:
    """One simulated run, kept for looking at afterwards."""

    controller: Controller
    trainer: SimulatedTrainer
    engine: SimulatedEngine
    tasks: Tasks
    state: RunState
    events: list[AnyEvent]
    log: MemoryGroupLog

    @property
    def drops(self) -> Counter[str]:
        return self.state.drops


class FlakyScorer(SimulatedScorer):
    """Fails for a share of the groups, chosen by their tasks."""

    failing = 0.0

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        score = await super().score_episode(task, episode)
        if zlib.crc32(task.id.encode()) % 100 < self.failing * 100:
            raise ScoringFailed("flaky", "score_error")
        return score


def build(
    *,
    late: Any = "mask",
    max_staleness: int = 2,
    groups_per_step: int = 2,
    steps: int = 6,
    token_s: float = 0.01,
    straggler: float = 0.0,
    step_s: float = 0.1,
    sync_s: float = 0.01,
    failing: float = 0.0,
    filter_zero_variance: bool = False,
    value: Any = lambda task, episode: float(episode.index),
    seed: int = 0,
    resume: Resume | None = None,
    workflow: Any = None,
    every: int = 1,
    stop_after: int | None = None,
    model: dict[str, Any] | None = None,
    checkpoints: Any = None,
    beside: Any = None,
    trained_groups: Any = None,
    log: MemoryGroupLog | None = None,
) -> World:
    rng = np.random.default_rng(seed)

    def num_tokens() -> int:
        return int(rng.integers(1, 6)) * (30 if rng.random() < straggler else 1)

    engine = SimulatedEngine(
        num_tokens=num_tokens,
        token_s=lambda: token_s * rng.lognormal(sigma=0.5),
        update_s=lambda: sync_s * rng.random(),
    )
    trainer = SimulatedTrainer(
        step_s=lambda: step_s * rng.lognormal(sigma=0.3), publish_s=lambda: sync_s * rng.random()
    )
    scorer = FlakyScorer(score_s=lambda: token_s * rng.random(), value=value)
    scorer.failing = failing
    tasks = Tasks()
    state, memory = RunState(), MemoryReader()
    config = PenstockConfig.model_validate(
        {
            "rollout": {"group_size": 3, "groups_per_step": groups_per_step, "max_new_tokens": 1000},
            "staleness": {"max_staleness": max_staleness, "late": late, "max_filtered_in_a_row": 20},
            "algorithm": {"selection": {"zero_variance": {}} if filter_zero_variance else {}},
            "trainer": {"micro_batch_tokens": 64},
            "run": {"steps": steps},
            "sync": {"every": every},
            "model": model or {},
        }
    )
    log = log or MemoryGroupLog()
    parts = Parts(
        engines=EnginePool({"engine0": engine}),
        trainers=[trainer],
        scorer=scorer,
        tokenizer=SimulatedTokenizer(),
        tasks=tasks,
        episodes=LocalEpisodes(engine, SimulatedTokenizer(), workflow and as_workflow(workflow)),
        log=log,
        checkpoints=checkpoints,
        trained_groups=trained_groups,
    )
    controller: Controller

    async def make() -> None:
        nonlocal controller
        loop = asyncio.get_running_loop()
        stream = EventStream(loop, defer=loop.call_soon)
        stream.subscribe("state", state)
        stream.subscribe("memory", memory)
        controller = build_controller(config, parts, resume=resume, events=stream)
        await controller.start()
        if stop_after is not None:
            await asyncio.gather(controller.run(), stop_at(controller, stop_after))
        elif beside is not None:
            await asyncio.gather(controller.run(), beside(controller))
        else:
            await controller.run()
        stream.close()

    run_in_virtual_time(make())
    return World(controller, trainer, engine, tasks, state, memory.events, log)


async def stop_at(controller: Controller, step: int) -> None:
    await controller.reached(step)
    controller.stop()


def staleness_of(world: World) -> list[int]:
    return [
        plan.ages[sequence.group][int(version)]
        for plan in world.trainer.plans
        for batch in plan.micro_batches
        for sequence in batch
        for version in sequence.sample.versions[sequence.sample.loss_mask]
    ]


speeds = st.sampled_from([0.0003, 0.003, 0.03, 0.3])


@settings(max_examples=60, deadline=None)
@given(
    late=st.sampled_from(["wait", "mask", "drop"]),
    max_staleness=st.integers(0, 5),
    groups_per_step=st.integers(1, 4),
    token_s=speeds,
    step_s=speeds,
    sync_s=speeds,
    straggler=st.sampled_from([0.0, 0.1, 0.5]),
    failing=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 10_000),
)
def test_no_token_past_the_bound_is_trained_and_the_run_ends(**settings: Any) -> None:
    """A deadlock would be raised by the virtual clock; a livelock would never reach the last step."""
    world = build(**settings)
    assert len(world.trainer.plans) == 6
    assert [(plan.step, plan.publishes) for plan in world.trainer.plans] == [(n, n) for n in range(1, 7)]
    ended = world.log.attempts.counts()
    assert ended["trained"] == 6 * settings["groups_per_step"]
    assert ended["dropped"] == sum(world.drops.values())
    assert max(staleness_of(world)) <= settings["max_staleness"]
    assert min(staleness_of(world)) >= 0
    for plan in world.trainer.plans:
        assert len(plan.scores) == settings["groups_per_step"]


@settings(max_examples=15, deadline=None)
@given(
    token_s=speeds,
    step_s=speeds,
    sync_s=speeds,
    straggler=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_zero_staleness_is_on_policy_whatever_is_late(**settings: Any) -> None:
    for late in ("wait", "mask", "drop", "correct"):
        world = build(max_staleness=0, late=late, **settings)
        assert set(staleness_of(world)) == {0}
        assert world.drops == Counter()


def test_wait_drops_nothing_where_drop_does() -> None:
    settings = dict(straggler=0.2, token_s=0.02, step_s=0.01, seed=3, steps=20)
    waiting, dropping = build(late="wait", **settings), build(late="drop", **settings)
    assert waiting.drops == Counter()
    assert dropping.drops["stale"] > 0
    assert len(dropping.tasks.returned) == dropping.drops["stale"]
    assert set(dropping.tasks.returned) <= set(dropping.tasks.issued)


def test_mask_takes_late_tokens_out_of_the_loss_and_correct_keeps_them() -> None:
    settings = dict(straggler=0.2, token_s=0.02, step_s=0.01, seed=3, steps=20)
    masked, corrected = build(late="mask", **settings), build(late="correct", **settings)
    assert max(staleness_of(masked)) == 2
    assert max(staleness_of(corrected)) > 2
    left_out = [
        1
        for plan in masked.trainer.plans
        for batch in plan.micro_batches
        for sequence in batch
        if sequence.sample.num_loss_tokens < (sequence.sample.versions >= 0).sum()
    ]
    assert left_out


def test_nothing_is_generated_only_to_be_thrown_away() -> None:
    world = build(late="mask", straggler=0.0, steps=6)
    assert len(world.tasks.issued) == 6 * 2


def test_an_adapter_follows_the_weights_below_it_before_anything_is_generated() -> None:
    world = build(steps=2, model={"lora": {"rank": 4}})
    first, second = world.trainer.plans
    assert (first.publishes, second.publishes) == (2, 3)
    assert (first.ages, first.fresh) == (({1: 0},) * 2, (0, 1))
    assert world.engine.version == 3


@pytest.mark.parametrize("every", [2, 3])
def test_every_nth_step_is_published_and_the_last_one_always(every: int) -> None:
    world = build(steps=7, every=every, max_staleness=2, late="wait", sync_s=0.0001)
    published = [plan.step for plan in world.trainer.plans if plan.publishes is not None]
    assert published == [*range(every, 7, every), 7] if 7 % every else [*range(every, 8, every)]
    assert [plan.publishes for plan in world.trainer.plans if plan.publishes is not None] == list(
        range(1, len(published) + 1)
    )
    assert world.engine.version == len(published)
    assert world.controller.buffer.gate.served_step == 7
    assert max(staleness_of(world)) == 2  # counted in updates of the history, not in versions
    assert min(staleness_of(world)) >= 0


def test_a_run_that_is_stopped_between_publications_serves_its_last_weights() -> None:
    world = build(steps=9, every=3, max_staleness=2, stop_after=4)
    done = world.controller.steps_done
    assert 4 <= done < 9
    assert world.controller.buffer.gate.served_step == done
    assert world.controller.buffer.gate.history.step_of(world.engine.version) == done


class Stands:
    """Checkpoints that take a while, and keep where the controller stood."""

    def __init__(self) -> None:
        self.taken: list[Resume] = []

    def is_due(self, step: int) -> bool:
        return True

    async def begin(self, point: Resume) -> None:
        self.taken.append(point)
        await asyncio.sleep(0.5)

    async def settle(self) -> None:
        pass


def test_a_synchronous_run_has_no_group_under_way_in_its_checkpoints() -> None:
    """So that a run which goes on from one has the same numbers and tasks as one that was never stopped."""
    stands = Stands()
    build(max_staleness=0, steps=5, filter_zero_variance=True, checkpoints=stands)
    gates = [point.gate for point in stands.taken]
    assert [gate.step for gate in gates] == [1, 2, 3, 4, 5]
    assert all(not gate.running and not gate.ready for gate in gates)
    assert [gate.num_admitted for gate in gates] == [2, 4, 6, 8, 10]


def test_training_overlaps_generation() -> None:
    """Generation and training take the same time: staleness 0 alternates, staleness 2 overlaps them."""
    settings = dict(token_s=0.03, step_s=0.1, sync_s=0.0001, steps=30, late="mask")

    def time_of(max_staleness: int) -> float:
        return build(max_staleness=max_staleness, **settings).state.last_progress

    assert time_of(2) < 0.7 * time_of(0)


def test_zero_variance_groups_are_replaced() -> None:
    world = build(
        filter_zero_variance=True, value=lambda task, episode: float(episode.index * (int(task.id[1:]) % 2))
    )
    assert len(world.trainer.plans) == 6
    assert world.drops["zero_variance"] >= 6
    assert all(
        len({score.value for score in scores}) == 3 for plan in world.trainer.plans for scores in plan.scores
    )


def test_only_zero_variance_ends_the_run_with_a_sentence() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        build(filter_zero_variance=True, value=lambda task, episode: 1.0)
    (error,) = caught.value.exceptions
    assert isinstance(error, UserError)
    assert str(error).startswith(
        "the last 20 groups were all dropped by selection (the last for zero_variance, its scores around 1)"
    )


def test_failed_scores_cost_their_group_with_a_reason() -> None:
    world = build(failing=0.4)
    reasons = Counter(
        entry.reason for entry in world.log.attempts.by_number.values() if entry.state == "dropped"
    )
    assert world.drops == reasons
    assert reasons["score_error"] > 0
    assert len(world.trainer.plans) == 6


def test_a_resumed_run_goes_on_with_its_numbers_steps_and_versions() -> None:
    """Two groups were under way at step 4: they are generated first, under their old numbers."""
    running = tuple(Ticket(number=number, bound=2, deadline=6) for number in (8, 9))
    gate = GateState(
        step=4, served_step=4, max_staleness=2, num_admitted=12, num_trained=8, running=running, ready=()
    )
    log = MemoryGroupLog()
    for number in (7, 8, 9):
        log.attempts.by_number[number] = Attempt(Ticket(number=number, bound=2, deadline=6), f"old{number}")
    world = build(
        steps=6,
        log=log,
        resume=Resume(
            gate=gate,
            history=HistoryState(policy="policy", steps=(0, 1, 2, 3, 3, 4)),
            task_ids={number: f"old{number}" for number in (8, 9)},
            lost=(
                LostGroup(
                    group=Group(number=7, task=Task(id="old7", prompt="p"), episodes=()),
                    scores=(),
                    reason="lost_blob",
                    message="blob group-7/x can't be read",
                ),
            ),
        ),
    )
    drops = [event for event in world.events if isinstance(event, Drop)]
    assert [(drop.group, drop.task_id, drop.reason) for drop in drops] == [(7, "old7", "lost_blob")]
    assert [(plan.step, plan.publishes) for plan in world.trainer.plans] == [(5, 7), (6, 8)]
    assert {
        number: entry.task_id for number, entry in world.log.attempts.by_number.items() if number < 12
    } == {
        7: "old7",
        8: "old8",
        9: "old9",
    }
    assert min(number for number in world.log.attempts.by_number if number > 9) == 12
    assert world.log.attempts.counts() == Counter(trained=4, dropped=1)
    assert world.log.attempts.standing.version_steps == {"policy": (4, 5, 6)}


def test_every_stage_tells_what_it_does() -> None:
    world = build(late="drop", straggler=0.2, token_s=0.02, step_s=0.01, seed=3, steps=20, failing=0.2)
    spans = [event for event in world.events if isinstance(event, Span)]
    counts = Counter((span.track.split()[0], span.name) for span in spans)
    num_groups = len(world.log.attempts.by_number)
    assert counts["train", "wait for groups"] == counts["train", "plan"] == counts["train", "step"] == 20
    updates = [event for event in world.events if isinstance(event, UpdateEvent)]
    assert counts["sync", "publish"] == counts["sync", "update"] == len(updates)
    assert len(updates) + sum(event.num_skipped for event in updates) == 21
    assert counts["slot", "generate"] == num_groups
    assert counts["admission", "blocked"] > 0
    assert all(span.start <= span.time for span in spans)
    for track in {span.track for span in spans}:
        own = sorted((span.start, span.time) for span in spans if span.track == track)
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(own)), track


def test_a_drop_says_what_was_lost() -> None:
    world = build(late="drop", straggler=0.2, token_s=0.02, step_s=0.01, seed=3, steps=20, failing=0.2)
    drops = {event.group: event for event in world.events if isinstance(event, Drop)}
    entries = {
        number: entry for number, entry in world.log.attempts.by_number.items() if entry.state == "dropped"
    }
    assert {number: drop.reason for number, drop in drops.items()} == {
        number: entry.reason for number, entry in entries.items()
    }
    assert {drop.reason for drop in drops.values()} == {"stale", "score_error"}
    assert all(drop.task_id == entries[number].task_id for number, drop in drops.items())
    assert all(drop.age > 2 for drop in drops.values() if drop.reason == "stale")
    samples = [event for event in world.events if isinstance(event, SampleEvent)]
    assert all(
        sum(sample.num_output_tokens for sample in samples if sample.group == number) == drop.num_tokens > 0
        for number, drop in drops.items()
    )


def test_every_trained_episode_is_a_sample_of_its_step() -> None:
    world = build(late="mask", failing=0.2)
    samples = [event for event in world.events if isinstance(event, SampleEvent)]
    trained = {
        number: entry.step
        for number, entry in world.log.attempts.by_number.items()
        if entry.state == "trained"
    }
    assert sorted(
        (sample.group, sample.episode, sample.step) for sample in samples if not sample.drop
    ) == sorted((number, episode, step) for number, step in trained.items() for episode in range(3))
    assert all(sample.reward == sample.episode for sample in samples if sample.step)
    # Rewards 0, 1 and 2 in every group: minus their mean, over their standard deviation, which is 1.
    assert all(sample.advantage == pytest.approx(sample.episode - 1) for sample in samples if sample.step)
    assert all(sample.advantage is None for sample in samples if sample.drop)


async def looks_twice(task: Task, rollout: Rollout) -> None:
    first = await rollout.generate(task.prompt, max_tokens=1)
    await rollout.generate([*first.token_ids, 0, 9])


def test_a_sample_has_all_turns_with_special_tokens() -> None:
    world = build(workflow=looks_twice)
    samples = [event for event in world.events if isinstance(event, SampleEvent)]
    for sample in samples:
        *known, last = [(one.turn, one.role, one.after, one.text) for one in sample.turns]
        assert known[0] == (0, "context", None, "5 6 7")
        assert known[2] == (1, "context", 0, "0 9")
        assert last == (1, "model", None, sample.answer)
    assert len(samples) > 30


def test_there_is_no_event_for_a_token() -> None:
    """Ten times the tokens, the same number of events."""
    few, many = (
        len(build(late="mask", max_staleness=0, token_s=token_s, straggler=straggler).events)
        for token_s, straggler in ((0.01, 0.0), (0.001, 1.0))
    )
    assert many == few


async def breaks_sometimes(task: Task, rollout: Rollout) -> None:
    """Its episode 1 always fails; in every third group, episode 0 does too."""
    await rollout.generate(task.prompt)
    if rollout.spec.index == 1 or (rollout.spec.index == 0 and rollout.spec.group % 3 == 0):
        raise KeyError("no such tool")


def test_failed_episodes_are_out_of_loss_and_baseline_and_too_many_cost_the_group() -> None:
    world = build(workflow=breaks_sometimes, value=lambda task, episode: float(10 * episode.index))
    assert len(world.trainer.plans) == 6
    for plan in world.trainer.plans:
        assert [[score.value for score in scores] for scores in plan.scores] == [[0.0, 20.0]] * 2
        assert [len(tokens) for tokens in plan.num_tokens] == [2, 2]
        assert plan.num_sequences == 4
    dropped = [event for event in world.events if isinstance(event, Drop)]
    assert {(event.reason, event.group % 3) for event in dropped} == {("failed_episodes", 0)}
    assert (
        "failed; the first (workflow_error): KeyError: 'no such tool' (test_controller.py:"
        in dropped[0].message
    )
    assert all(event.num_tokens > 0 for event in dropped)
    told = [event for event in world.events if isinstance(event, SampleEvent) and event.failure is not None]
    assert len(told) == world.state.failures["workflow_error"] == 12 + 2 * len(dropped)
    assert {event.step is None for event in told if event.group % 3 == 0} == {True}
    assert world.state.row["failed_workflow_error"] > 0


def test_the_mean_of_the_largest_rewards_is_finite() -> None:
    world = build(value=lambda task, episode: 3e38, steps=1)
    (reward,) = [event.reward for event in world.events if isinstance(event, StepEvent)]
    assert reward == pytest.approx(3e38)


@pytest.mark.parametrize("late", ["mask", "wait", "drop", "correct"])
def test_steps_that_are_undone_while_the_next_waits_for_groups_are_trained_again(late: str) -> None:
    """Their groups are ready as soon as they are back, before the trainer is."""
    done: list[StepGroups] = []
    log = MemoryGroupLog()

    class Done:
        async def after(self, step: int) -> BroughtBack:
            steps = [taken for taken in done if taken.step >= step]
            del done[step:]
            log.append(RunResumed(step=step))
            return BroughtBack(ready=[group for taken in steps for group in taken.groups])

    async def lose_the_trainer(controller: Controller) -> None:
        trained = controller.buffer.trained

        async def note(taken: StepGroups) -> None:
            await trained(taken)
            done.append(taken)

        controller.buffer.trained = note  # type: ignore[method-assign]
        await controller.reached(4)
        while controller.activity.trainer != "waiting for groups":  # noqa: ASYNC110 (in virtual time)
            await asyncio.sleep(0.001)
        controller.trainer_lost()
        await controller.pause()
        await controller.roll_back(1, with_numbers((), done[0].numbers))

    world = build(late=late, steps=8, token_s=0.5, beside=lose_the_trainer, trained_groups=Done(), log=log)
    assert [taken.step for taken in done] == list(range(8))
    numbers = [number for taken in done for number in taken.numbers]
    assert len(numbers) == len(set(numbers)) == 16
    assert world.controller.buffer.gate.outstanding <= 2 * 2 * 3


def test_the_virtual_clock_sees_a_deadlock() -> None:
    with pytest.raises(Deadlock):
        run_in_virtual_time(asyncio.Event().wait())


def test_a_broadcast_has_a_moment_at_which_both_sides_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side of an update ends before the other has begun: one after the other would be a deadlock."""
    moments: dict[tuple[str, int], asyncio.Event] = {}
    sent: list[int] = []

    async def meet(me: str, other: str, version: int) -> None:
        for side in (me, other):
            moments.setdefault((side, version), asyncio.Event())
        moments[me, version].set()
        await moments[other, version].wait()

    class Broadcasting(SimulatedTrainer):
        async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
            return msgspec.structs.replace(await super().publish(version), sends=True)

        async def send(self, version: int) -> None:
            await meet("trainer", "engine", version)
            sent.append(version)

    class Listening(SimulatedEngine):
        async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
            await meet("engine", "trainer", update.version)
            return await super().update(update, interrupt)

    monkeypatch.setitem(globals(), "SimulatedTrainer", Broadcasting)
    monkeypatch.setitem(globals(), "SimulatedEngine", Listening)
    world = build(steps=3)
    assert sent == [0, 1, 2, 3]
    assert world.engine.version == 3


def test_an_engine_without_the_base_is_sent_a_full_update(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    class Partial(SimulatedTrainer):
        async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
            asked.append((version, full))
            update = await super().publish(version)
            base = None if full or version == 0 else version - 1
            return msgspec.structs.replace(update, base=base)

    class Forgetful(SimulatedEngine):
        async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
            if update.version == 2 and update.base is not None:
                raise BaseMissing("engine0 has weights of no version")
            return await super().update(update, interrupt)

    monkeypatch.setitem(globals(), "SimulatedTrainer", Partial)
    monkeypatch.setitem(globals(), "SimulatedEngine", Forgetful)
    world = build(steps=3)
    assert asked == [(0, False), (1, False), (2, False), (2, True), (3, False)]
    assert world.engine.version == 3
