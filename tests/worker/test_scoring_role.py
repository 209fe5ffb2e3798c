"""The scoring process without its process: what it says when it has started, and how it answers."""

import asyncio
from pathlib import Path

import pytest

from penstock.observe.event_queue import EventQueue
from penstock.scoring.scoring_process import (
    ScoringProcess,
    ScoringReady,
    ScoringRequest,
    ScoringStart,
    Verdict,
)
from penstock.worker.scoring_role import start
from tests.scoring.groups import a_group
from tests.worker.test_engine_role import Served

REWARDS = """
def plain(task, completion, device):
    return float(completion) + (100 if device == "cuda:0" else 0)

async def judge(task, completion):
    return float(completion)

def trl(completions):
    return [float(completion) for completion in completions]
"""


async def started(folder: Path, served: Served, **reward: object) -> ScoringReady:
    (folder / "rewards.py").write_text(REWARDS)
    functions = [f"{folder / 'rewards.py'}:{name}" for name in reward.pop("names")]  # type: ignore[attr-defined]
    begin = ScoringStart(reward={"functions": functions, **reward}, search_path=())
    return await start(served, begin, lambda error: None, EventQueue().of("scorer0"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "ready"),
    [
        (["plain"], ScoringReady(needs_group=False, concurrency=1)),
        (["plain", "judge"], ScoringReady(needs_group=False, concurrency=5)),
        (["judge", "trl"], ScoringReady(needs_group=True, concurrency=1)),
    ],
)
def test_a_worker_says_what_its_functions_need(tmp_path: Path, names: list[str], ready: ScoringReady) -> None:
    assert asyncio.run(started(tmp_path, Served(), names=names, concurrency=5)) == ready


@pytest.mark.parametrize(("device", "expected"), [("cpu", 1.0), ("cuda:3", 101.0)])
def test_requests_of_a_message_are_answered_in_order_and_the_gpu_is_the_first(
    tmp_path: Path, device: str, expected: float
) -> None:
    async def main() -> tuple[Verdict, ...]:
        served = Served()
        await started(tmp_path, served, names=["plain"], device=device)
        groups = (a_group("1"), a_group("x"))
        requests = tuple(ScoringRequest(task=group.task, episodes=group.episodes) for group in groups)
        return await served.asked(ScoringProcess).score(requests)

    first, second = asyncio.run(main())
    assert first.scores[0].value == expected
    assert second.reason == "score_error"
