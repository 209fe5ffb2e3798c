"""The process that runs workflows, without its process: both ends of its channel on one loop."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from penstock.channel import Channel, remote, serve
from penstock.engines.scripted import ScriptedEngine
from penstock.observe.event_queue import EventQueue
from penstock.observe.events import Counters, LogLine, Span
from penstock.records import Episode
from penstock.rollout.episode_pool import EpisodePool
from penstock.rollout.episode_rollout import TokenSource
from penstock.rollout.episode_runner import EpisodeRunner
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.rollout_process import Outcome, RolloutProcess, RolloutStart
from penstock.worker.rollout_role import Tallies, start
from tests.rollout.contract import END, SEVEN, EpisodeRunnerContract, spec_of


class ChannelWorker:
    """A worker over a channel whose other end is in this process too."""

    def __init__(self, controller: Channel) -> None:
        self._calls = remote(RolloutProcess, controller)

    async def answer(self, specs: Sequence[EpisodeSpec]) -> Sequence[Outcome]:
        return [await self._calls.run(spec) for spec in specs]

    async def end(self) -> None:
        raise NotImplementedError

    async def restart(self, num_deaths: int) -> None:
        raise NotImplementedError


class TestRolloutRole(EpisodeRunnerContract):
    @asynccontextmanager
    async def runner(self, engine: ScriptedEngine, model: Path) -> AsyncIterator[EpisodeRunner]:
        ends = [Channel(*await asyncio.open_connection(sock=end)) for end in socket.socketpair()]
        reading = [asyncio.create_task(end.run()) for end in ends]
        controller, worker = ends
        serve(TokenSource, engine, controller)
        request = RolloutStart(model=str(model), workflow=None, search_path=())
        queue = EventQueue()
        await start(worker, request, lambda error: None, queue.of("rollout0"))
        try:
            yield EpisodePool([ChannelWorker(controller)], capacity=8)
        finally:
            for end in ends:
                await end.close()
            await asyncio.gather(*reading)
        spans = [event for event in queue.take().events if isinstance(event, Span)]
        assert spans
        assert {(span.track.split()[0], span.name) for span in spans} == {("episode", "episode")}

    def test_streams_come_through_all_processes_in_the_engines_pieces(self, tiny_model: Path) -> None:
        engine = ScriptedEngine(lambda request: [SEVEN] * 7 + [END], max_context=64)
        spec = msgspec.structs.replace(spec_of("streamed"), chunk_tokens=3)
        (episode,) = self.run(tiny_model, spec, engine=engine)
        assert (episode.failure, episode.reward, episode.text) == (None, 3.0, "7777777")
        assert (len(episode.turns), episode.unread_answers) == (1, 0)

    def test_a_client_that_walks_out_of_a_stream_costs_that_answer_alone(self, tiny_model: Path) -> None:
        """The engine never ends what nobody listens to."""
        held = asyncio.Event()

        async def sleep(seconds: float) -> None:
            if engine.requests[-1].token_ids.tolist() == [3, 11, 3, 12] and engine.num_given >= 2:
                await held.wait()
            engine.num_given += 1

        engine = CountingEngine(lambda request: [SEVEN] * 7 + [END], max_context=64, sleep=sleep)
        spec = msgspec.structs.replace(spec_of("walks_out"), chunk_tokens=1)
        (episode,) = self.run(tiny_model, spec, engine=engine)
        assert (episode.failure, episode.unread_answers) == (None, 1)
        assert [turn.prompt_ids.tolist() for turn in episode.turns] == [[2, 11, 2, 12]]


class CountingEngine(ScriptedEngine):
    num_given = 0


def test_rewrites_and_unread_answers_are_counted_and_the_first_of_each_kind_is_told() -> None:
    async def main() -> None:
        queue = EventQueue()
        tallies = Tallies(queue.of("rollout0"))
        for rewrites, unread in (({}, 0), ({"client": 1}, 0), ({"client": 2, "template": 1}, 1), ({}, 2)):
            episode = Episode(task_id="t", turns=(), rewrites=rewrites, unread_answers=unread)
            tallies.tell("g1.2", episode)
        events = queue.take().events
        lines = [event.line for event in events if isinstance(event, LogLine)]
        assert [line.split(" (metric")[0].split(":")[0] for line in lines[:1]] == [
            "in episode g1.2 the client rewrote what was said before"
        ]
        assert sorted(line.split(":")[0] for line in lines[1:]) == [
            "in episode g1.2 a client left before the end of its answer",
            "in episode g1.2 the template rewrote what was said before",
        ]
        counts = [event.values for event in events if isinstance(event, Counters)]
        assert counts[-1] == {"rewritten_by_client": 3, "rewritten_by_template": 1, "unread_answers": 3}

    asyncio.run(main())
