"""Turns a worker into a scoring process. User code runs in a thread, so a hanging reward can't hide the run's
end."""

import asyncio
from collections.abc import Callable

from penstock.channel import Channel, implement, serve
from penstock.observe.recorder import Recorder
from penstock.observe.slots import Slots
from penstock.scoring.config import RewardConfig
from penstock.scoring.functions import calls_at_once, load_functions, needs_group
from penstock.scoring.reward_thread import RewardThread
from penstock.scoring.scoring_process import (
    ScoringProcess,
    ScoringReady,
    ScoringRequest,
    ScoringStart,
    Verdict,
)
from penstock.usercode import extend_search_path
from penstock.worker.call_limits import CallLimits


async def start(
    channel: Channel, request: ScoringStart, fail: Callable[[BaseException], None], events: Recorder
) -> ScoringReady:
    extend_search_path(request.search_path)
    config = RewardConfig.model_validate(request.reward)
    # CUDA_VISIBLE_DEVICES shows the process only its own GPU, which is then the first.
    device = "cpu" if config.device == "cpu" else "cuda:0"
    rewards = await asyncio.to_thread(load_functions, config, device=device)
    thread = RewardThread(rewards)
    slots = Slots()
    limits = CallLimits(cpu_s=config.cpu_s or config.timeout_s * (config.threads + 1))

    async def score(requests: tuple[ScoringRequest, ...]) -> tuple[Verdict, ...]:
        slot = slots.take()
        try:
            with (
                limits.calls(len(requests)),
                events.measure(f"reward {slot}", "score", calls=len(requests)),
            ):
                return await thread.answer(requests)
        finally:
            slots.give_back(slot)

    serve(ScoringProcess, implement(ScoringProcess, {"score": score}.__getitem__), channel)
    return ScoringReady(
        needs_group=needs_group(rewards), concurrency=calls_at_once(rewards, config.concurrency)
    )
