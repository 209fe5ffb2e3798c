"""A process that runs workflows: each episode in a thread, so that one that blocks stops neither the others nor the
channel."""

import asyncio
import sys
from collections.abc import Callable

from penstock.channel import Channel
from penstock.engines.engine_client import EngineClient
from penstock.models.tokenizer import ChatTokenizer
from penstock.observe.recorder import Recorder
from penstock.observe.slots import Slots
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.episode_runner import TIMEOUT, failed_episode, run_episode
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.episode_thread import EngineOfAnotherLoop, run_in_thread
from penstock.rollout.rollout_client import RUN_EPISODE, Outcome, RolloutStart
from penstock.rollout.workflow import Workflows, load_workflow

GRACE_S = 5.0
"""How long after its time limit an episode may take to notice it."""


async def start(
    channel: Channel, request: RolloutStart, fail: Callable[[BaseException], None], events: Recorder
) -> None:
    sys.path[:0] = [folder for folder in request.search_path if folder not in sys.path]
    tokenizer = await asyncio.to_thread(
        ChatTokenizer,
        request.model,
        trust_remote_code=request.trust_remote_code,
        template_args=request.template_args,
    )
    default = load_workflow(request.workflow) if request.workflow is not None else None
    workflows = Workflows(default)
    engine = EngineOfAnotherLoop(EngineClient(channel), asyncio.get_running_loop())
    slots = Slots()

    async def run(spec: EpisodeSpec) -> Outcome:
        slot = slots.take()
        try:
            with events.measure(f"episode {slot}", "episode", episode=spec.name, task=spec.task.id):
                return await run_unmeasured(spec)
        finally:
            slots.give_back(slot)

    async def run_unmeasured(spec: EpisodeSpec) -> Outcome:
        rollout = Rollout(spec, engine, tokenizer)
        workflow = workflows.of(spec.task)
        try:
            async with asyncio.timeout(spec.timeout_s + min(GRACE_S, spec.timeout_s)):
                episode = await run_in_thread(lambda: run_episode(workflow, rollout), name=spec.name)
            return Outcome(episode=episode)
        except TimeoutError:
            message = f"the episode blocks, {spec.timeout_s:g} s (rollout.timeout_s) are over"
            episode = failed_episode(spec, TIMEOUT, message, rollout.turns)
            return Outcome(episode=episode, stuck=True)

    channel.serve(RUN_EPISODE, run)
