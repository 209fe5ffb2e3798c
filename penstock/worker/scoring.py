"""A scoring process: user code in a thread, so that a hanging reward never hides that the run is over."""

import asyncio
import sys
from collections.abc import Callable

from penstock.channel import Channel
from penstock.errors import ScoringFailed
from penstock.scoring.client import SCORE, ScoringStart, Verdict
from penstock.scoring.config import RewardConfig
from penstock.scoring.functions import load_functions, score_group
from penstock.types import Group


async def start(channel: Channel, request: ScoringStart, fail: Callable[[BaseException], None]) -> None:
    sys.path[:0] = [folder for folder in request.search_path if folder not in sys.path]
    functions = await asyncio.to_thread(load_functions, RewardConfig.model_validate(request.reward))

    async def score(group: Group) -> Verdict:
        try:
            return Verdict(scores=await asyncio.to_thread(score_group, functions, group))
        except ScoringFailed as error:
            return Verdict(reason=error.reason, message=str(error), detail=error.detail)

    channel.serve(SCORE, score)
