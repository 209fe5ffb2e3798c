"""Workers that die, hang and get stuck: what each costs, and when it is replaced."""

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.scripted import ScriptedEngine
from penstock.errors import ChannelClosed, OutOfMemory, RemoteError, UserError, WorkerDied
from penstock.models.tokenizer import ChatTokenizer
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import Episode
from penstock.rollout.episode_pool import EpisodePool
from penstock.rollout.episode_runner import EpisodeRunner, LocalEpisodes
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.rollout_process import Outcome
from tests.rollout.contract import EpisodeRunnerContract, spec_of


class MemoryWorker:
    """`EpisodeWorker` without a process. A test decides how each episode ends, by its index."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.answers: dict[int, asyncio.Future[Outcome]] = {}
        self.num_restarts = 0
        self.num_ends = 0
        self.waits: list[int] = []
        """The deaths in a row that it was told of before each start."""
        self.restart_errors: list[Exception] = []

    async def answer(self, specs: Sequence[EpisodeSpec]) -> Sequence[Outcome]:
        (spec,) = specs
        return [await self.run(spec)]

    async def run(self, spec: EpisodeSpec) -> Outcome:
        self.begun.append(spec.index)
        answer = self.answers[spec.index] = asyncio.get_running_loop().create_future()
        return await answer

    async def end(self) -> None:
        self.num_ends += 1
        self.die("ended")

    async def restart(self, num_deaths: int) -> None:
        self.num_restarts += 1
        self.waits.append(num_deaths)
        if self.restart_errors:
            raise self.restart_errors.pop(0)

    def finish(self, index: int, *, stuck: bool = False) -> None:
        self.answers.pop(index).set_result(Outcome(episode=good(index), stuck=stuck))

    def die(self, how: str = "killed") -> None:
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(WorkerDied(how))
        self.answers.clear()


class LoopWorker(MemoryWorker):
    """Runs episodes on this loop."""

    def __init__(self, episodes: LocalEpisodes) -> None:
        super().__init__()
        self._episodes = episodes

    async def run(self, spec: EpisodeSpec) -> Outcome:
        return Outcome(episode=await self._episodes.run(spec))


class TestEpisodePool(EpisodeRunnerContract):
    @asynccontextmanager
    async def runner(self, engine: ScriptedEngine, model: Path) -> AsyncIterator[EpisodeRunner]:
        tokenizer = ChatTokenizer(str(model))
        yield EpisodePool([LoopWorker(LocalEpisodes(engine, tokenizer)) for _ in range(2)], capacity=4)


def good(index: int) -> Episode:
    return Episode(task_id="t", turns=(), index=index)


async def settle() -> None:
    """Let everything that can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)


class Bench:
    """A pool over memory workers, and the episodes that were asked of it."""

    def __init__(self, num_workers: int = 1, capacity: int = 4, **arguments: Any) -> None:
        self.workers = [MemoryWorker() for _ in range(num_workers)]
        self.pool = EpisodePool(self.workers, capacity=capacity, **arguments)
        self.episodes: list[asyncio.Task[Episode]] = []

    async def ask(self, count: int, timeout_s: float = 60.0, group_size: int = 0) -> None:
        """Episodes of one task, or each of a task of its own, t0, t1, …"""
        for index in range(len(self.episodes), len(self.episodes) + count):
            spec = spec_of(index=index, timeout_s=timeout_s)
            if group_size:
                task = msgspec.structs.replace(spec.task, id=f"t{index}")
                spec = msgspec.structs.replace(spec, group=index // group_size, task=task)
            self.episodes.append(asyncio.create_task(self.pool.run(spec)))
        await settle()

    async def failures(self) -> list[str | None]:
        return [episode.failure for episode in await asyncio.gather(*self.episodes)]


def test_the_least_loaded_takes_the_next_and_the_rest_wait() -> None:
    async def main() -> None:
        bench = Bench(num_workers=2, capacity=2)
        await bench.ask(5)
        one, two = bench.workers
        assert (one.begun, two.begun) == ([0, 2], [1, 3])
        two.finish(1)
        await settle()
        assert two.begun == [1, 3, 4]

    run_in_virtual_time(main())


def test_only_so_many_commands_run_at_once() -> None:
    async def main() -> None:
        bench = Bench(num_workers=2, capacity=4, workflow="python agent.py", commands=2)
        await bench.ask(4)
        one, two = bench.workers
        assert (one.begun, two.begun) == ([0], [1])
        function = asyncio.create_task(bench.pool.run(spec_of("twice", index=9)))
        await settle()
        assert one.begun == [0, 9]
        two.finish(1)
        await settle()
        assert two.begun == [1, 2]
        one.finish(0)
        one.finish(9)
        two.finish(2)
        await settle()
        assert (one.begun, two.begun) == ([0, 9, 3], [1, 2])
        one.finish(3)
        assert await bench.failures() == [None] * 4
        assert (await function).index == 9

    run_in_virtual_time(main())


def test_what_was_in_a_process_that_died_runs_again_apart() -> None:
    """One worker: a half at a time, and who comes later waits."""

    async def main() -> None:
        bench = Bench(capacity=8)
        await bench.ask(4)
        (worker,) = bench.workers
        worker.die()
        await settle()
        await bench.ask(1)
        assert (worker.begun, worker.num_restarts, worker.waits) == ([0, 1, 2, 3, 0, 1], 1, [0])
        worker.finish(0)
        worker.finish(1)
        await settle()
        assert worker.begun[6:] == [2, 3]
        worker.finish(2)
        worker.finish(3)
        await settle()
        assert worker.begun[8:] == [4]
        worker.finish(4)
        assert await bench.failures() == [None] * 5
        assert worker.num_restarts == 1

    run_in_virtual_time(main())


def test_an_episode_that_ends_its_process_alone_has_failed_and_its_task_is_named() -> None:
    told: list[str] = []

    async def main() -> None:
        bench = Bench(report=told.append)
        await bench.ask(2)
        (worker,) = bench.workers
        worker.die()
        await settle()
        assert worker.begun == [0, 1, 0]
        worker.finish(0)
        await settle()
        worker.die("oom")
        assert await bench.failures() == [None, "worker_died"]
        assert bench.episodes[1].result().message == told[0]

    run_in_virtual_time(main())
    assert told == ["task 't' ended its process twice, the last time alone in it: oom"]


def test_a_half_that_dies_clears_the_other_which_runs_beside_new_episodes() -> None:
    async def main() -> None:
        bench = Bench(capacity=8)
        await bench.ask(4, group_size=1)
        await bench.ask(1, group_size=1)
        (worker,) = bench.workers
        worker.die()
        await settle()
        await bench.ask(1, group_size=1)
        assert worker.begun[5:] == [0, 1]
        worker.die()
        await settle()
        assert worker.begun[7:] == [0]
        worker.finish(0)
        await settle()
        assert worker.begun[8:] == [1]
        worker.finish(1)
        await settle()
        assert worker.begun[9:] == [2, 3, 4, 5]
        for index in (2, 3, 4, 5):
            worker.finish(index)
        assert await bench.failures() == [None] * 6

    run_in_virtual_time(main())


def test_of_two_workers_one_stays_for_those_whom_nobody_suspects() -> None:
    async def main() -> None:
        bench = Bench(num_workers=2, capacity=8)
        await bench.ask(4)
        one, two = bench.workers
        one.die()
        await settle()
        await bench.ask(1)
        assert (one.begun, two.begun) == ([0, 2, 0], [1, 3, 4])
        one.finish(0)
        await settle()
        assert one.begun == [0, 2, 0, 2]
        one.finish(2)
        for index in (1, 3, 4):
            two.finish(index)
        assert await bench.failures() == [None] * 5
        await bench.ask(2)
        assert (one.begun[4:], two.begun[3:]) == ([5], [6])
        one.finish(5)
        two.finish(6)
        assert await bench.failures() == [None] * 7

    run_in_virtual_time(main())


def test_waiting_apart_takes_nothing_of_the_time_limit() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.ask(2, timeout_s=60.0)
        (worker,) = bench.workers
        worker.die()
        await settle()
        await asyncio.sleep(59.0)
        worker.finish(0)
        await settle()
        await asyncio.sleep(59.0)
        worker.finish(1)
        assert await bench.failures() == [None, None]

    run_in_virtual_time(main())


def test_two_culprits_stand_for_their_task() -> None:
    """The others of the task are not tried, also those that come later."""

    async def main() -> None:
        bench = Bench(capacity=8)
        await bench.ask(8)
        await bench.ask(1)
        (worker,) = bench.workers
        for _ in range(5):
            worker.die()
            await settle()
        assert await bench.failures() == ["worker_died"] * 9
        assert worker.begun[8:] == [0, 1, 2, 3, 0, 1, 0, 1]
        assert bench.episodes[8].result().message == (
            "2 calls of task 't' have ended their process, so that this one was not tried again"
        )

    run_in_virtual_time(main())


def test_a_culprit_of_an_evaluation_is_tried_again_in_the_next() -> None:
    """Its group has the same number there."""

    async def main() -> None:
        bench = Bench(capacity=8)
        (worker,) = bench.workers
        await bench.ask(2)
        for _ in range(5):
            worker.die()
            await settle()
        assert await bench.failures() == ["worker_died"] * 2
        await bench.ask(1)
        worker.finish(2)
        assert (await bench.episodes[2]).failure is None

    run_in_virtual_time(main())


def test_a_stuck_episode_lets_the_others_end_before_the_process_is_replaced() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.ask(2)
        (worker,) = bench.workers
        worker.finish(0, stuck=True)
        await settle()
        await bench.ask(1)
        assert (worker.begun, worker.num_restarts) == ([0, 1], 0)
        worker.finish(1)
        await settle()
        assert (worker.begun, worker.num_restarts) == ([0, 1, 2], 1)
        worker.finish(2)
        assert await bench.failures() == [None, None, None]

    run_in_virtual_time(main())


def test_a_process_that_answers_no_more_is_ended_and_costs_who_hangs_alone() -> None:
    async def main() -> None:
        bench = Bench(silence_s=30.0)
        await bench.ask(1, timeout_s=10.0)
        await bench.ask(1, timeout_s=10.0)
        (worker,) = bench.workers
        await asyncio.sleep(41.0)
        assert (worker.num_ends, worker.num_restarts, worker.begun) == (1, 1, [0, 1, 0])
        worker.finish(0)
        assert await bench.failures() == [None, "timeout"]
        assert asyncio.get_running_loop().time() == pytest.approx(81.0)
        assert worker.num_ends == 2
        await bench.ask(1)
        assert worker.num_restarts == 2
        worker.finish(2)
        assert await bench.failures() == [None, "timeout", None]

    run_in_virtual_time(main())


def test_tasks_that_all_end_their_process_end_the_run() -> None:
    async def main() -> None:
        bench = Bench(capacity=1)
        await bench.ask(1, group_size=1)
        for _ in range(5):
            await bench.ask(1, group_size=1)
            for _ in range(2):
                bench.workers[0].die("oom")
                await settle()
        results = await asyncio.gather(*bench.episodes, return_exceptions=True)
        assert [getattr(result, "failure", None) for result in results] == ["worker_died"] * 5 + [None]
        assert str(results[5]) == (
            "5 tasks in a row ended the process that they had to themselves, and no call was answered between "
            "them; the last: task 't4' ended its process twice, the last time alone in it: oom; look at the "
            "workflow, and at what ends processes on this machine (rollout.memory_gb, rollout.cpu_s)"
        )

    run_in_virtual_time(main())


def test_bad_tasks_that_were_under_way_together_never_end_the_run() -> None:
    async def main() -> None:
        bench = Bench(capacity=16)
        await bench.ask(10, group_size=1)
        worker = bench.workers[0]
        while set(worker.answers) != {9}:
            worker.die()
            await settle()
        worker.finish(9)
        assert await bench.failures() == ["worker_died"] * 9 + [None]

    run_in_virtual_time(main())


def test_a_finished_episode_starts_the_count_of_bad_tasks_again() -> None:
    async def main() -> None:
        bench = Bench(capacity=1)
        worker = bench.workers[0]
        for index in range(9):
            await bench.ask(1, group_size=1)
            if index in (4, 8):
                worker.finish(index)
            else:
                worker.die()
                await settle()
                worker.die()
            await settle()
        assert await bench.failures() == ["worker_died"] * 4 + [None] + ["worker_died"] * 3 + [None]

    run_in_virtual_time(main())


def test_starts_that_fail_time_after_time_end_the_run_and_wake_who_waits() -> None:
    async def main() -> None:
        bench = Bench(capacity=1)
        bench.workers[0].restart_errors = [WorkerDied("no memory")] * 5
        await bench.ask(2)
        bench.workers[0].die()
        for episode in bench.episodes:
            with pytest.raises(WorkerDied) as raised:
                await episode
            assert str(raised.value) == (
                "rollout worker 0 died 5 times in a row without an answer; the last time: no memory"
            )
        assert bench.workers[0].waits == [0, 1, 2, 3, 4]

    run_in_virtual_time(main())


def test_a_start_that_fails_is_tried_again() -> None:
    async def main() -> None:
        bench = Bench(capacity=1)
        bench.workers[0].restart_errors = [WorkerDied("no memory")]
        await bench.ask(1)
        bench.workers[0].die()
        await settle()
        assert bench.workers[0].num_restarts == 2
        bench.workers[0].finish(0)
        assert await bench.failures() == [None]

    run_in_virtual_time(main())


def test_a_start_without_room_counts_as_a_death() -> None:
    async def scene() -> None:
        bench = Bench()
        await bench.ask(1)
        bench.workers[0].restart_errors = [OutOfMemory("no room on the GPU")]
        bench.workers[0].die()
        await settle()
        assert bench.workers[0].waits == [0, 1]
        bench.workers[0].finish(0)
        assert await bench.failures() == [None]

    run_in_virtual_time(scene())


def test_a_start_that_the_user_must_mend_ends_the_pool() -> None:
    """The worker's code may have changed since the run began."""

    async def scene() -> None:
        bench = Bench()
        await bench.ask(1)
        bench.workers[0].restart_errors = [UserError("rewards.py has a mistake") for _ in range(99)]
        bench.workers[0].die()
        with pytest.raises(UserError, match="^rewards.py has a mistake$"):
            await bench.pool.lost(0, WorkerDied("killed"))
        with pytest.raises(UserError, match="^rewards.py has a mistake$"):
            await bench.episodes[0]
        assert bench.workers[0].num_restarts == 1

    run_in_virtual_time(scene())


def test_an_engine_that_is_gone_is_not_the_workers_death() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.ask(1)
        bench.workers[0].answers.pop(0).set_exception(RemoteError("engine0", kind="ChannelClosed"))
        with pytest.raises(ChannelClosed, match="engine0"):
            await bench.episodes[0]
        assert bench.workers[0].num_restarts == 0

    run_in_virtual_time(main())


def test_closing_wakes_who_waits() -> None:
    async def main() -> None:
        bench = Bench(capacity=1)
        await bench.ask(2)
        await bench.pool.close()
        with pytest.raises(ChannelClosed, match="the pool of rollout workers is closed"):
            await bench.episodes[1]
        bench.episodes[0].cancel()

    run_in_virtual_time(main())


def test_a_worker_without_episodes_that_is_lost_is_replaced() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.pool.lost(0, WorkerDied("killed"))
        assert bench.workers[0].num_restarts == 1
        await bench.ask(1)
        bench.workers[0].finish(0)
        assert await bench.failures() == [None]

    run_in_virtual_time(main())


def test_a_worker_that_is_lost_under_its_episodes_is_replaced_when_they_know() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.ask(1)
        losing = asyncio.create_task(bench.pool.lost(0, WorkerDied("killed")))
        await settle()
        assert bench.workers[0].num_restarts == 0
        bench.workers[0].die()
        await losing
        assert bench.workers[0].num_restarts == 1
        bench.workers[0].finish(0)
        assert await bench.failures() == [None]

    run_in_virtual_time(main())


class PoisonedWorker(MemoryWorker):
    """Its process ends some seconds after a bad episode begins; good ones take their time."""

    def __init__(self, poison: dict[tuple[int, int], float], takes_s: Callable[[EpisodeSpec], float]) -> None:
        super().__init__()
        self._poison, self._takes_s = poison, takes_s
        self.num_deaths = 0
        self._gone = asyncio.Event()

    async def run(self, spec: EpisodeSpec) -> Outcome:
        gone, strikes_s = self._gone, self._poison.get((spec.group, spec.index))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._takes_s(spec) if strikes_s is None else strikes_s):
                await gone.wait()
        if strikes_s is not None and not gone.is_set():
            gone.set()
            self.num_deaths += 1
        if gone.is_set():
            raise WorkerDied("exit code 1")
        return Outcome(episode=good(spec.index))

    async def restart(self, num_deaths: int) -> None:
        await super().restart(num_deaths)
        await asyncio.sleep(1.0)
        self._gone = asyncio.Event()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_innocent_episode_ends_well_and_every_culprit_fails(data: st.DataObject) -> None:
    """Innocent is every episode of a task with less than two culprits that is none itself."""
    num_workers, capacity = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    num_groups, group_size = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
    names = [(group, index) for group in range(num_groups) for index in range(group_size)]
    poison = data.draw(st.dictionaries(st.sampled_from(names), st.floats(0.1, 9.0), max_size=8))
    seed = data.draw(st.integers(0, 2**16))

    def takes_s(spec: EpisodeSpec) -> float:
        return 0.1 + random.Random(f"{seed} {spec.name}").expovariate(0.3)

    async def main() -> None:
        workers = [PoisonedWorker(poison, takes_s) for _ in range(num_workers)]
        told: list[str] = []
        pool = EpisodePool(workers, capacity=capacity, report=told.append)
        specs = [msgspec.structs.replace(spec_of(index=index), group=group) for group, index in names]
        episodes = await asyncio.gather(*(pool.run(spec) for spec in specs))
        await pool.close()
        culprits = Counter(group for group, _ in poison)
        for name, episode in zip(names, episodes, strict=True):
            if name in poison:
                assert episode.failure == "worker_died"
            elif culprits[name[0]] < 2:
                assert episode.failure is None
        assert len(told) == len(culprits)
        # Each search ends at a culprit, after the first death and two rows of halves: of tasks, of a task's episodes.
        rows = math.ceil(math.log2(capacity)) + math.ceil(math.log2(group_size)) + 2
        assert sum(worker.num_deaths for worker in workers) <= len(poison) * (rows + 1)

    run_in_virtual_time(main())
