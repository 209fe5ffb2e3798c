"""Workers that die, hang and get stuck: what each costs, and when it is replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.scripted import ScriptedEngine
from penstock.errors import ChannelClosed, WorkerDied
from penstock.models.tokenizer import ChatTokenizer
from penstock.orchestration.virtual_time import run_in_virtual_time
from penstock.rollout.episode_pool import EpisodePool
from penstock.rollout.episode_runner import EpisodeRunner, LocalEpisodes
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.rollout_client import EngineGone, Outcome
from penstock.types import Episode
from tests.rollout.contract import EpisodeRunnerContract, spec_of


class MemoryWorker:
    """`EpisodeWorker` without a process. A test decides how each episode ends, by its index."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.answers: dict[int, asyncio.Future[Outcome]] = {}
        self.num_restarts = 0
        self.num_ends = 0
        self.restart_errors: list[Exception] = []

    async def run(self, spec: EpisodeSpec) -> Outcome:
        self.begun.append(spec.index)
        answer = self.answers[spec.index] = asyncio.get_running_loop().create_future()
        return await answer

    async def end(self) -> None:
        self.num_ends += 1
        self.die("ended")

    async def restart(self) -> None:
        self.num_restarts += 1
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

    async def ask(self, count: int, timeout_s: float = 60.0) -> None:
        first = len(self.episodes)
        self.episodes += [
            asyncio.create_task(self.pool.run(spec_of(index=first + i, timeout_s=timeout_s)))
            for i in range(count)
        ]
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


def test_a_death_costs_its_episodes_and_the_process_is_replaced_when_needed() -> None:
    async def main() -> None:
        bench = Bench(num_workers=2, tries_after_death=0)
        await bench.ask(4)
        bench.workers[0].die()
        await settle()
        bench.workers[1].finish(1)
        bench.workers[1].finish(3)
        assert await bench.failures() == ["worker_died", None, "worker_died", None]
        assert bench.workers[0].num_restarts == 0
        await bench.ask(5)
        assert bench.workers[1].begun == [1, 3, 4, 5, 6, 7]
        assert (bench.workers[0].begun, bench.workers[0].num_restarts) == ([0, 2, 8], 1)

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


def test_a_process_that_answers_no_more_is_ended_and_costs_all_its_episodes() -> None:
    async def main() -> None:
        bench = Bench(silence_s=30.0, tries_after_death=0)
        await bench.ask(1, timeout_s=10.0)
        await bench.ask(1, timeout_s=1000.0)
        assert await bench.failures() == ["timeout", "worker_died"]
        assert asyncio.get_running_loop().time() == pytest.approx(40.0)
        assert bench.workers[0].num_ends == 1
        await bench.ask(1)
        assert (bench.workers[0].num_restarts, bench.workers[0].begun) == (1, [0, 1, 2])

    run_in_virtual_time(main())


def test_five_deaths_in_a_row_end_the_run_and_wake_who_waits() -> None:
    async def main() -> None:
        bench = Bench(capacity=1, tries_after_death=0)
        await bench.ask(6)
        for _ in range(5):
            bench.workers[0].die("oom")
            await settle()
        results = await asyncio.gather(*bench.episodes, return_exceptions=True)
        assert [getattr(result, "failure", None) for result in results[:5]] == ["worker_died"] * 5
        assert str(results[5]) == (
            "rollout worker 0 died 5 times in a row without finishing an episode; the last time: oom"
        )

    run_in_virtual_time(main())


def test_a_finished_episode_starts_the_count_of_deaths_again() -> None:
    async def main() -> None:
        bench = Bench(capacity=1, tries_after_death=0)
        await bench.ask(9)
        worker = bench.workers[0]
        for index in range(9):
            if index == 4:
                worker.finish(4)
            elif index < 8:
                worker.die()
            else:
                worker.finish(8)
            await settle()
        assert await bench.failures() == ["worker_died"] * 4 + [None] + ["worker_died"] * 3 + [None]

    run_in_virtual_time(main())


def test_a_start_that_fails_is_tried_again() -> None:
    async def main() -> None:
        bench = Bench(capacity=1, tries_after_death=0)
        bench.workers[0].restart_errors = [WorkerDied("no memory")]
        await bench.ask(2)
        bench.workers[0].die()
        await settle()
        assert bench.workers[0].num_restarts == 2
        bench.workers[0].finish(1)
        assert await bench.failures() == ["worker_died", None]

    run_in_virtual_time(main())


def test_an_engine_that_is_gone_is_not_the_workers_death() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.ask(1)
        bench.workers[0].answers.pop(0).set_exception(EngineGone("engine0"))
        with pytest.raises(ChannelClosed, match="engine0"):
            await bench.episodes[0]
        assert bench.workers[0].num_restarts == 0

    run_in_virtual_time(main())


def test_closing_wakes_who_waits() -> None:
    async def main() -> None:
        bench = Bench(capacity=1)
        await bench.ask(2)
        await bench.pool.close()
        with pytest.raises(ChannelClosed, match="the episode pool is closed"):
            await bench.episodes[1]
        bench.episodes[0].cancel()

    run_in_virtual_time(main())


def test_episodes_whose_worker_died_begin_again_once() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.ask(2)
        (worker,) = bench.workers
        worker.die()
        await settle()
        assert (sorted(worker.begun), worker.num_restarts) == ([0, 0, 1, 1], 1)
        worker.finish(0)
        worker.die()
        assert await bench.failures() == [None, "worker_died"]

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
        bench = Bench(tries_after_death=0)
        await bench.ask(1)
        losing = asyncio.create_task(bench.pool.lost(0, WorkerDied("killed")))
        await settle()
        assert bench.workers[0].num_restarts == 0
        bench.workers[0].die()
        await losing
        assert bench.workers[0].num_restarts == 1
        assert await bench.failures() == ["worker_died"]

    run_in_virtual_time(main())
