"""The pool: time limits, deaths and restarts, in virtual time against scripted workers."""

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ChannelClosed, RemoteError, RequestRefused, ScoringFailed, WorkerDied
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import Episode, Score
from penstock.scoring.scorer_pool import ScorerPool
from penstock.scoring.scoring_process import ScoringRequest, Verdict
from tests.scoring.fakes import Behaviour, ScriptedWorker, good, pool_over, raising, slow
from tests.scoring.groups import a_group

DIED = WorkerDied("worker scorer0 was killed by SIGKILL", "its last words")
HANG = slow(10**6)


def value_of(pool: ScorerPool, number: int = 0) -> Coroutine[Any, Any, tuple[Score, ...]]:
    return pool.score(a_group(str(number), task_id=f"t{number}", number=number))


async def outcome(pool: ScorerPool, number: int = 0) -> float | str:
    """The value, or the reason why there is none."""
    try:
        (score,) = await value_of(pool, number)
    except ScoringFailed as error:
        return error.reason
    return score.value


def test_groups_go_to_free_workers_in_order() -> None:
    workers = [ScriptedWorker(slow(2.5), slow(1)), ScriptedWorker(slow(1), slow(1), slow(1))]

    async def main() -> None:
        pool = pool_over(workers, timeout_s=10)
        assert await asyncio.gather(*(outcome(pool, number) for number in range(5))) == [0, 1, 2, 3, 4]
        assert asyncio.get_running_loop().time() == 3.5

    run_in_virtual_time(main())
    assert workers[0].groups == [0, 4]
    assert workers[1].groups == [1, 2, 3]


def test_a_call_past_its_limit_costs_its_group_and_restarts_its_worker() -> None:
    worker = ScriptedWorker(HANG, good)

    async def main() -> None:
        pool = pool_over([worker], timeout_s=30)
        with pytest.raises(ScoringFailed) as raised:
            await value_of(pool, 7)
        assert str(raised.value) == "scoring task 't7' took longer than reward.timeout_s=30"
        assert raised.value.reason == "score_timeout"
        assert asyncio.get_running_loop().time() == 30.0
        assert await outcome(pool, 8) == 8

    run_in_virtual_time(main())
    assert worker.num_restarts == 1


def test_a_hanging_worker_does_not_hold_up_the_others() -> None:
    workers = [ScriptedWorker(HANG), ScriptedWorker(*[slow(1)] * 9)]

    async def main() -> list[float | str]:
        pool = pool_over(workers, timeout_s=100)
        return await asyncio.gather(*(outcome(pool, number) for number in range(10)))

    assert run_in_virtual_time(main()) == ["score_timeout", *range(1, 10)]
    assert len(workers[1].groups) == 9


def test_the_limit_counts_from_the_start_of_the_call_and_not_of_the_wait() -> None:
    async def main() -> list[float | str]:
        pool = pool_over([ScriptedWorker(*[slow(9)] * 5)], timeout_s=10)
        return await asyncio.gather(*(outcome(pool, number) for number in range(5)))

    assert run_in_virtual_time(main()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [DIED, WorkerDied("gone", "its last words"), ChannelClosed("closed")])
def test_a_worker_that_dies_twice_costs_its_group_and_is_restarted(error: Exception) -> None:
    worker, told = ScriptedWorker(raising(error), raising(error)), list[str]()

    async def main() -> None:
        pool = pool_over([worker], timeout_s=10, report=told.append)
        with pytest.raises(ScoringFailed) as raised:
            await value_of(pool)
        assert raised.value.reason == "score_worker_died"
        assert str(raised.value) == (
            f"scoring task 't0' ended its process twice, the last time alone in it: {error}"
        )
        assert told == [str(raised.value)]
        assert raised.value.detail == getattr(error, "detail", "")
        assert await outcome(pool, 1) == 1

    run_in_virtual_time(main())
    assert worker.num_restarts == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ScoringFailed("nan", "score_nan"), "score_nan"), (RemoteError("boom", detail="trace"), "score_error")],
)
def test_a_failing_function_costs_its_group_and_no_restart(error: Exception, reason: str) -> None:
    worker = ScriptedWorker(raising(error))

    async def main() -> list[float | str]:
        pool = pool_over([worker], timeout_s=10)
        return [await outcome(pool, 0), await outcome(pool, 1)]

    assert run_in_virtual_time(main()) == [reason, 1]
    assert worker.num_restarts == 0


def test_a_worker_that_dies_again_and_again_ends_the_run() -> None:
    worker = ScriptedWorker(*[raising(DIED)] * 12)

    async def main() -> None:
        pool = pool_over([worker], timeout_s=10)
        outcomes = [
            (await asyncio.gather(outcome(pool, number), return_exceptions=True))[0] for number in range(6)
        ]
        assert outcomes[:5] == ["score_worker_died"] * 5
        assert isinstance(outcomes[5], WorkerDied)
        assert str(outcomes[5]) == (
            "5 tasks in a row ended the process that they had to themselves, and no call was answered between them; the "
            "last: scoring task 't4' ended its process twice, the last time alone in it: worker scorer0 was killed by "
            "SIGKILL; look at the reward functions, and at what ends processes on this machine (reward.memory_gb, "
            "reward.cpu_s)"
        )
        assert outcomes[5].detail == "its last words"

    run_in_virtual_time(main())


def test_bad_tasks_that_were_under_way_together_never_end_the_run() -> None:
    worker = Poisoned(range(9), lambda number: 1.0, concurrency=16)

    async def main() -> list[float | str]:
        pool = pool_over([worker], timeout_s=30)
        return await asyncio.gather(*(outcome(pool, number) for number in range(10)))

    assert run_in_virtual_time(main()) == ["score_worker_died"] * 9 + [9]


def test_calls_that_come_while_the_worker_of_a_bad_one_is_started_wait_for_it() -> None:
    async def main() -> list[float | str]:
        pool = pool_over([Poisoned({0}, lambda number: 1.0)], timeout_s=30)
        bad = asyncio.create_task(outcome(pool, 0))
        await asyncio.sleep(3.5)  # it has died twice, and is not back
        return [await outcome(pool, 1), await bad]

    assert run_in_virtual_time(main()) == [1, "score_worker_died"]


def test_a_task_whose_calls_end_their_process_one_after_the_other_is_told_of_once() -> None:
    told: list[str] = []

    async def main() -> None:
        pool = pool_over([Poisoned({3}, lambda number: 1.0)], timeout_s=30, report=told.append)
        calls = [asyncio.create_task(outcome(pool, 3)) for _ in range(4)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        for call in calls:
            call.cancel()  # as the group does that has failed
        assert await outcome(pool, 1) == 1

    run_in_virtual_time(main())
    assert len(told) == 1


def test_a_worker_that_cannot_be_started_again_ends_the_run() -> None:
    broken = RemoteError("the reward module 'x' could not be imported", detail="trace")
    worker = ScriptedWorker(raising(DIED), restarts=(broken,) * 5)

    async def main() -> None:
        pool = pool_over([worker], timeout_s=10)
        with pytest.raises(
            WorkerDied, match=r"died 5 times in a row .* the last time: the reward module 'x'"
        ) as raised:
            await value_of(pool)
        assert raised.value.detail == "trace"

    run_in_virtual_time(main())
    assert worker.num_restarts == 5


def test_a_start_that_hangs_counts_as_a_death() -> None:
    class NeverReady(ScriptedWorker):
        async def restart(self, num_deaths: int) -> None:
            await asyncio.sleep(10**9)

    async def main() -> None:
        pool = pool_over([NeverReady(HANG)], timeout_s=10, start_s=60)
        assert await outcome(pool) == "score_timeout"
        with pytest.raises(WorkerDied, match="the last time: it was not ready within 60 s"):
            await value_of(pool, 1)

    run_in_virtual_time(main())


def test_deaths_between_successes_never_end_the_run() -> None:
    worker = ScriptedWorker(*[raising(DIED), raising(DIED), good] * 5)

    async def main() -> list[float | str]:
        pool = pool_over([worker], timeout_s=10)
        return [await outcome(pool, number) for number in range(10)]

    outcomes = run_in_virtual_time(main())
    assert outcomes.count("score_worker_died") == 5
    assert worker.num_restarts == 10


def test_timeouts_alone_never_end_the_run() -> None:
    async def main() -> list[float | str]:
        pool = pool_over([ScriptedWorker(*[HANG] * 6)], timeout_s=10)
        return [await outcome(pool, number) for number in range(7)]

    assert run_in_virtual_time(main()) == ["score_timeout"] * 6 + [6]


def test_a_worker_left_in_the_middle_is_restarted_before_its_next_group() -> None:
    worker = ScriptedWorker(HANG)

    async def main() -> float | str:
        pool = pool_over([worker], timeout_s=100)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(value_of(pool, 0), 5)
        return await outcome(pool, 1)

    assert run_in_virtual_time(main()) == 1
    assert worker.num_restarts == 1


def test_a_caller_that_gives_up_leaves_its_worker_alone() -> None:
    worker = ScriptedWorker(slow(8))

    async def main() -> None:
        pool = pool_over([worker], timeout_s=100)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(value_of(pool, 0), 5)
        assert await outcome(pool, 1) == 1
        assert asyncio.get_running_loop().time() == 8.0

    run_in_virtual_time(main())
    assert worker.num_restarts == 0


def test_what_a_left_call_raises_is_lost_on_nobody() -> None:
    async def fail_late(episodes: Sequence[Episode]) -> tuple[Score, ...]:
        await asyncio.sleep(8)
        raise ScoringFailed("nan", "score_nan")

    async def main() -> None:
        pool = pool_over([ScriptedWorker(fail_late)], timeout_s=100)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(value_of(pool, 0), 5)
        assert await outcome(pool, 1) == 1
        await pool.close()

    run_in_virtual_time(main())


def test_an_episode_is_a_call_and_holds_one_worker() -> None:
    workers = [ScriptedWorker(slow(5)), ScriptedWorker(*[slow(1)] * 3)]

    async def main() -> None:
        pool = pool_over(workers, timeout_s=10)
        group = a_group("0", "1", "2", "3")
        scores = await asyncio.gather(*(pool.score_episode(group.task, one) for one in group.episodes))
        assert [score.value for score in scores] == [0, 1, 2, 3]
        assert asyncio.get_running_loop().time() == 5.0

    run_in_virtual_time(main())
    assert [len(worker.groups) for worker in workers] == [1, 3]


def test_a_worker_that_awaits_gets_several_calls_at_once_and_others_their_share() -> None:
    workers = [ScriptedWorker(*[slow(1)] * 9, concurrency=3), ScriptedWorker(*[slow(1)] * 9, concurrency=3)]

    async def main() -> None:
        pool = pool_over(workers, timeout_s=10)
        assert await asyncio.gather(*(outcome(pool, number) for number in range(4))) == [0, 1, 2, 3]
        assert asyncio.get_running_loop().time() == 1.0

    run_in_virtual_time(main())
    assert [worker.groups for worker in workers] == [[0, 2], [1, 3]]


def test_calls_beside_one_that_hangs_are_tried_again_in_the_new_process() -> None:
    worker = ScriptedWorker(HANG, slow(9), slow(20), slow(1), concurrency=3)

    async def late(pool: ScorerPool) -> float | str:
        await asyncio.sleep(9.5)
        return await outcome(pool, 2)

    async def main() -> None:
        pool = pool_over([worker], timeout_s=10)
        outcomes = await asyncio.gather(outcome(pool, 0), outcome(pool, 1), late(pool))
        assert outcomes == ["score_timeout", 1, 2]

    run_in_virtual_time(main())
    assert worker.num_restarts == 1
    assert worker.groups == [0, 1, 2, 2]


def test_quick_calls_that_wait_go_out_together_and_slow_ones_alone() -> None:
    quick, slow_one = ScriptedWorker(), ScriptedWorker(*[slow(1)] * 20)

    async def main() -> None:
        for worker in (quick, slow_one):
            pool = pool_over([worker], timeout_s=10)
            assert await asyncio.gather(*(outcome(pool, number) for number in range(20))) == list(range(20))
            assert worker.groups == list(range(20))

    run_in_virtual_time(main())
    assert [len(message) for message in quick.messages] == [1, 2, 4, 8, 5]
    assert [len(message) for message in slow_one.messages] == [1] * 20


def test_quick_calls_go_out_together_however_long_their_way_is() -> None:
    worker = ScriptedWorker(way_s=1.0)

    async def main() -> None:
        pool = pool_over([worker], timeout_s=10)
        await asyncio.gather(*(outcome(pool, number) for number in range(20)))

    run_in_virtual_time(main())
    assert [len(message) for message in worker.messages] == [1, 2, 4, 8, 5]


def test_waiting_calls_are_shared_between_free_workers() -> None:
    workers = [ScriptedWorker(), ScriptedWorker()]

    async def main() -> None:
        pool = pool_over(workers, timeout_s=10)
        for _ in range(3):  # so that the pool knows how quick they are
            await asyncio.gather(*(outcome(pool, number) for number in range(30)))

    run_in_virtual_time(main())
    assert all(len(worker.groups) > 20 for worker in workers)


@pytest.mark.parametrize(
    ("behaviour", "reason"), [(HANG, "score_timeout"), (raising(DIED), "score_worker_died")]
)
def test_of_calls_in_one_message_only_the_bad_one_fails(behaviour: Behaviour, reason: str) -> None:
    async def main() -> list[float | str]:
        pool = pool_over([Picky()], timeout_s=10)
        return await asyncio.gather(*(outcome(pool, number) for number in range(12)))

    class Picky(ScriptedWorker):
        """Does it whenever it is asked for number 5."""

        async def _answer(self, requests: Sequence[ScoringRequest]) -> list[Verdict]:
            for request in requests:
                if request.episodes[0].text == "5":
                    await behaviour(request.episodes)
            return await super()._answer(requests)

    assert run_in_virtual_time(main()) == [0, 1, 2, 3, 4, reason, 6, 7, 8, 9, 10, 11]


def test_a_failing_function_costs_its_own_call_of_a_message() -> None:
    nan = raising(ScoringFailed("nan", "score_nan"))
    worker = ScriptedWorker(good, good, nan)

    async def main() -> None:
        pool = pool_over([worker], timeout_s=10)
        assert await asyncio.gather(*(outcome(pool, number) for number in range(4))) == [0, 1, "score_nan", 3]

    run_in_virtual_time(main())
    assert worker.messages == [[0], [1, 2], [3]]


def test_large_calls_that_wait_go_out_in_messages_of_bounded_bytes() -> None:
    worker = ScriptedWorker()
    text = "1".ljust(200_000)  # with its arrays 2.6 MB, of which three fit into a message

    async def main() -> None:
        pool = pool_over([worker], timeout_s=10)
        groups = [a_group(text, task_id=f"t{number}") for number in range(10)]
        await asyncio.gather(*(pool.score(group) for group in groups))

    run_in_virtual_time(main())
    assert worker.messages == [[0], [1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_a_call_that_is_too_large_by_itself_costs_its_group_and_no_other() -> None:
    class Narrow(ScriptedWorker):
        """Its channel refuses whatever holds number 5."""

        async def answer(self, requests: Sequence[ScoringRequest]) -> Sequence[Verdict]:
            if any(request.task.id == "t5" for request in requests):
                raise RequestRefused("scoring.score: a message must have at most 64 bytes, got 65")
            return await super().answer(requests)

    worker = Narrow()

    async def main() -> None:
        pool = pool_over([worker], timeout_s=10)
        outcomes = await asyncio.gather(*(outcome(pool, number) for number in range(8)))
        assert outcomes == [0, 1, 2, 3, 4, "score_too_large", 6, 7]
        with pytest.raises(ScoringFailed) as raised:
            await value_of(pool, 5)
        assert str(raised.value) == (
            "scoring task 't5' takes too large a message (scoring.score: a message must have at most 64 bytes, got "
            "65); make episodes shorter, or score each by itself where the reward takes a group"
        )

    run_in_virtual_time(main())
    assert worker.num_restarts == 0


class Poisoned(ScriptedWorker):
    """Its process ends some seconds after a call for a bad number begins; all of its calls are lost with it."""

    def __init__(self, poison: Collection[int], takes_s: Callable[[int], float], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._poison, self._takes_s, self._dying = poison, takes_s, asyncio.Event()
        self.num_deaths = self.num_inside = 0
        self.together: list[int] = []
        """With how many others each bad call ran."""

    async def _answer(self, requests: Sequence[ScoringRequest]) -> list[Verdict]:
        number, dying = int(requests[0].task.id[1:]), self._dying
        self.num_inside += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._takes_s(number)):
                    await dying.wait()
            if {int(request.task.id[1:]) for request in requests} & set(self._poison) and not dying.is_set():
                dying.set()
                self.num_deaths += 1
                self.together.append(self.num_inside - 1)
            if dying.is_set():
                raise DIED
            return await super()._answer(requests)
        finally:
            self.num_inside -= 1

    async def restart(self, num_deaths: int) -> None:
        await super().restart(num_deaths)
        self._dying = asyncio.Event()


def test_of_calls_at_once_only_the_one_that_ends_its_process_fails() -> None:
    worker = Poisoned({3}, lambda number: 5.0, concurrency=16)

    async def main() -> list[float | str]:
        pool = pool_over([worker], timeout_s=30)
        return await asyncio.gather(*(outcome(pool, number) for number in range(16)))

    assert run_in_virtual_time(main()) == [0, 1, 2, "score_worker_died", *range(4, 16)]
    assert (worker.together[0], worker.together[-1]) == (15, 0)
    assert worker.together == sorted(set(worker.together), reverse=True)


@settings(max_examples=60, deadline=None)
@given(
    num_workers=st.integers(1, 3),
    concurrency=st.integers(1, 8),
    num_calls=st.integers(1, 40),
    poison=st.sets(st.integers(0, 39), max_size=6),
    seed=st.integers(0, 999),
)
def test_a_call_that_ends_its_process_costs_no_other(
    num_workers: int, concurrency: int, num_calls: int, poison: set[int], seed: int
) -> None:
    def takes_s(number: int) -> float:
        return 0.05 + random.Random(f"{seed} {number}").expovariate(1.0)

    async def main() -> None:
        workers = [Poisoned(poison, takes_s, concurrency=concurrency) for _ in range(num_workers)]
        pool = pool_over(workers, timeout_s=100)
        outcomes = await asyncio.gather(*(outcome(pool, number) for number in range(num_calls)))
        bad = {number for number in poison if number < num_calls}
        assert outcomes == ["score_worker_died" if number in bad else number for number in range(num_calls)]
        # Each search ends at a culprit, after the first death and a row of halves.
        rows = math.ceil(math.log2(max(concurrency, 2))) + 2
        assert sum(worker.num_deaths for worker in workers) <= rows * len(bad)

    run_in_virtual_time(main())


def test_closing_wakes_who_waits() -> None:
    async def main() -> None:
        pool = pool_over([ScriptedWorker(HANG)], timeout_s=10**9)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(outcome(pool, 0))
            waiting = [group.create_task(expect_closed(pool, number)) for number in range(1, 4)]
            await asyncio.sleep(1)
            await pool.close()
            await pool.close()
            await asyncio.gather(*waiting)
            running.cancel()
        await expect_closed(pool, 9)

    async def expect_closed(pool: ScorerPool, number: int) -> None:
        with pytest.raises(ChannelClosed, match="the pool of scoring workers is closed"):
            await value_of(pool, number)

    run_in_virtual_time(main())


def test_a_pool_needs_workers() -> None:
    with pytest.raises(ValueError, match="at least one scoring worker"):
        pool_over([], timeout_s=1)


behaviours = st.sampled_from(["good", "slow", "hang", "die", "nan"])


@settings(max_examples=60, deadline=None)
@given(
    scripts=st.lists(st.lists(behaviours, max_size=8), min_size=1, max_size=3), num_groups=st.integers(1, 12)
)
def test_every_group_ends_once_whatever_the_workers_do(scripts: list[list[str]], num_groups: int) -> None:
    """Deaths are kept apart by successes, so that the pool never gives up."""
    nan = ScoringFailed("nan", "score_nan")
    table: dict[str, tuple[Behaviour, ...]] = {
        "good": (good,),
        "slow": (slow(3),),
        "hang": (HANG,),
        "die": (raising(DIED), good),
        "nan": (raising(nan),),
    }
    workers = [ScriptedWorker(*(step for name in script for step in table[name])) for script in scripts]

    async def main() -> None:
        pool = pool_over(workers, timeout_s=10)
        outcomes = await asyncio.gather(*(outcome(pool, number) for number in range(num_groups)))
        assert all(one == number for number, one in enumerate(outcomes) if not isinstance(one, str))

    run_in_virtual_time(main())
    assert {number for worker in workers for number in worker.groups} == set(range(num_groups))


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_a_call_whose_worker_died_is_tried_once_more(num_deaths: int) -> None:
    worker = ScriptedWorker(*[raising(DIED)] * num_deaths)

    async def main() -> float | str:
        return await outcome(pool_over([worker], timeout_s=10), 3)

    assert run_in_virtual_time(main()) == (3 if num_deaths == 1 else "score_worker_died")
    assert (
        worker.num_restarts == 1
    )  # the next one comes with the next call, or with the watch over the worker
    assert worker.groups == [3, 3]


def test_a_worker_without_calls_that_is_lost_is_replaced() -> None:
    worker = ScriptedWorker(good, good)

    async def main() -> None:
        pool = pool_over([worker], timeout_s=10)
        assert await outcome(pool, 0) == 0
        await pool.lost(0, WorkerDied("killed"))
        assert worker.num_restarts == 1
        assert await outcome(pool, 1) == 1

    run_in_virtual_time(main())
    assert worker.groups == [0, 1]


def test_workers_that_are_lost_time_after_time_end_the_pool() -> None:
    async def main() -> None:
        pool = pool_over([ScriptedWorker()], timeout_s=10)
        for _ in range(4):
            await pool.lost(0, WorkerDied("killed"))
        with pytest.raises(
            WorkerDied, match=r"scoring worker 0 died 5 times in a row without an answer; .*: killed"
        ):
            await pool.lost(0, WorkerDied("killed"))

    run_in_virtual_time(main())
