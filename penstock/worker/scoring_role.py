"""A scoring process: user code in a thread, so that a hanging reward never hides that the run is over."""

import asyncio
import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from penstock.channel import Channel
from penstock.errors import ScoringFailed
from penstock.observe.recorder import Recorder
from penstock.scoring.config import RewardConfig
from penstock.scoring.functions import load_functions, score_group
from penstock.scoring.scoring_client import SCORE, ScoringStart, Verdict
from penstock.types import Group


async def start(
    channel: Channel, request: ScoringStart, fail: Callable[[BaseException], None], events: Recorder
) -> None:
    sys.path[:0] = [folder for folder in request.search_path if folder not in sys.path]
    functions = await asyncio.to_thread(load_functions, RewardConfig.model_validate(request.reward))
    # One thread with one event loop of its own for the life of the process: async rewards may keep HTTP
    # sessions between calls.
    thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
    runner = asyncio.Runner()

    async def score(group: Group) -> Verdict:
        loop = asyncio.get_running_loop()
        try:
            scoring = functools.partial(score_group, functions, group, runner=runner)
            with events.measure("reward", "score", group=group.number):
                return Verdict(scores=await loop.run_in_executor(thread, scoring))
        except ScoringFailed as error:
            return Verdict(reason=error.reason, message=str(error), detail=error.detail)

    channel.serve(SCORE, score)
