"""The thread of rewards: one loop for its life, and an end when it is left."""

import asyncio
import threading

import pytest

from penstock.records import Task
from penstock.scoring.functions import wrap
from penstock.scoring.reward_thread import RewardThread
from penstock.scoring.scoring_process import ScoringRequest
from tests.scoring.groups import a_group

GROUP = a_group("1", "2")


def reward_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-reward"]


def test_async_functions_keep_one_event_loop_between_calls() -> None:
    loops = set()

    async def reward(task: Task, completion: str) -> float:
        loops.add(id(asyncio.get_running_loop()))
        return 1.0

    async def main() -> None:
        thread = RewardThread([wrap(reward)])
        for _ in range(3):
            await thread.score(GROUP.task, GROUP.episodes)
        loops.discard(id(asyncio.get_running_loop()))
        thread.leave()

    asyncio.run(main())
    assert len(loops) == 1


def test_a_message_has_a_verdict_for_each_request() -> None:
    async def main() -> None:
        thread = RewardThread([wrap(lambda task, completion: float(completion), name="r")])
        requests = [
            ScoringRequest(task=GROUP.task, episodes=a_group(*texts).episodes)
            for texts in (("1", "2"), ("x",), ("3",))
        ]
        first, second, third = await thread.answer(requests)
        assert [score.value for score in first.scores] == [1.0, 2.0]
        assert (second.reason, second.scores) == ("score_error", ())
        assert second.message.startswith("reward 'r' on task 't' raised ValueError")
        assert [score.value for score in third.scores] == [3.0]
        assert 0 < first.seconds < 5
        thread.leave()

    asyncio.run(main())


def test_a_thread_that_is_left_ends_after_its_last_call() -> None:
    before = set(reward_threads())
    entered, release = threading.Event(), threading.Event()

    def reward(task: Task, completion: str) -> float:
        entered.set()
        release.wait(60)
        return 1.0

    async def main() -> None:
        thread = RewardThread([wrap(reward)])
        call = asyncio.ensure_future(thread.score(GROUP.task, GROUP.episodes))
        await asyncio.to_thread(entered.wait, 60)
        thread.leave()
        release.set()
        assert [score.value for score in await call] == [1.0, 1.0]

    asyncio.run(main())
    for thread in set(reward_threads()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_giving_up_a_call_cancels_what_it_awaits() -> None:
    entered, cancelled = threading.Event(), threading.Event()

    async def reward(task: Task, completion: str) -> float:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 0.0

    async def main() -> None:
        thread = RewardThread([wrap(reward)])
        call = asyncio.ensure_future(thread.score(GROUP.task, GROUP.episodes))
        await asyncio.to_thread(entered.wait, 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        thread.leave()

    asyncio.run(main())
    assert cancelled.wait(60)
