"""Turns a worker into a process that runs workflows. Each episode has a thread, so one that blocks stops neither
the others nor the channel."""

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from penstock.channel import Channel, implement, remote, serve
from penstock.http_server.http_calls import HttpConfig
from penstock.models.tokenizer import ChatTokenizer
from penstock.observe.recorder import Recorder
from penstock.observe.slots import Slots
from penstock.records import CallAnswer, Episode
from penstock.rollout.episode_rollout import Rollout, TokenSource
from penstock.rollout.episode_runner import TIMEOUT, failed_episode, run_episode
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.episode_thread import CrossLoopEngine, run_in_thread
from penstock.rollout.rollout_process import CallKeeper, Outcome, RolloutProcess, RolloutStart
from penstock.rollout.workflow import Workflows, load_workflow
from penstock.serve.agents.agent_server import AgentServer
from penstock.usercode import extend_search_path
from penstock.worker.call_limits import CallLimits

GRACE_S = 5.0
"""How long after its time limit an episode may take to notice it."""


async def start(
    channel: Channel, request: RolloutStart, fail: Callable[[BaseException], None], events: Recorder
) -> None:
    extend_search_path(request.search_path)
    tokenizer = await asyncio.to_thread(
        ChatTokenizer,
        request.model,
        trust_remote_code=request.trust_remote_code,
        template_args=request.template_args,
    )
    http = HttpConfig.model_validate(request.http)
    default = load_workflow(request.workflow, http) if request.workflow is not None else None
    workflows = Workflows(default, http)
    client, keeper = remote(TokenSource, channel), remote(CallKeeper, channel)
    engine = CrossLoopEngine(client, asyncio.get_running_loop())
    door = AgentServer(
        client,
        tokenizer,
        model=request.model,
        max_context=request.max_context,
        names=request.model_names,
        host=request.host,
        streams=request.streams,
    )
    await door.open()
    slots, tallies = Slots(), Tallies(events)
    here = asyncio.get_running_loop()
    limits = CallLimits(cpu_s=request.cpu_s)

    async def keep_call(answer: CallAnswer) -> None:
        """Send a call to be kept, from the thread of an episode."""
        telling = asyncio.run_coroutine_threadsafe(keeper.keep_call(answer), here)
        await asyncio.wrap_future(telling)

    async def run(spec: EpisodeSpec) -> Outcome:
        slot = slots.take()
        try:
            with (
                limits.calls(),
                events.measure(f"episode {slot}", "episode", episode=spec.name, task=spec.task.id),
            ):
                outcome = await run_unmeasured(spec)
            tallies.tell(spec.name, outcome.episode)
            return outcome
        finally:
            slots.give_back(slot)

    async def run_unmeasured(spec: EpisodeSpec) -> Outcome:
        rollout = Rollout(spec, engine, tokenizer, keep_call)
        workflow = workflows.of(spec.task)
        endpoint, is_stuck = door.admit(rollout), False
        try:
            async with asyncio.timeout(spec.timeout_s + min(GRACE_S, spec.timeout_s)):
                episode = await run_in_thread(lambda: run_episode(workflow, rollout), name=spec.name)
        except TimeoutError:
            message = f"the episode blocks, {spec.timeout_s:g} s (rollout.timeout_s) are over"
            episode, is_stuck = failed_episode(spec, TIMEOUT, message, rollout), True
        finally:
            num_unread = door.dismiss(endpoint)
        return Outcome(episode=msgspec.structs.replace(episode, unread_answers=num_unread), stuck=is_stuck)

    serve(RolloutProcess, implement(RolloutProcess, {"run": run}.__getitem__), channel)
    door.close_after(channel.wait_closed())


class Tallies:
    """Counts rewritten conversations and unread answers as counters of this process, and logs the first of each."""

    def __init__(self, events: Recorder) -> None:
        self._events = events
        self._counts: Counter[str] = Counter()

    def tell(self, name: str, episode: Episode) -> None:
        counts = {f"rewritten_by_{who}": count for who, count in episode.rewrites.items()}
        if episode.unread_answers:
            counts["unread_answers"] = episode.unread_answers
        if not counts:
            return
        for metric in counts.keys() - self._counts.keys():
            self._events.log(f"in episode {name} {_told(metric)} (metric {metric}; docs/agents.md says more)")
        self._counts.update(counts)
        self._events.count(**self._counts)


def _told(metric: str) -> str:
    if metric == "unread_answers":
        return "a client left before the end of its answer: the turn is no part of the episode"
    who = metric.removeprefix("rewritten_by_")
    return (
        f"the {who} rewrote what was said before: the turn began a sequence of its own, with earlier turns as "
        "context"
    )
