import asyncio
from typing import Any

import pytest

from penstock.blob_stores import MemoryBlobs
from penstock.errors import UserError
from penstock.loop.admission import GateState, StalenessGate, Ticket
from penstock.loop.attempts import Attempt
from penstock.loop.failure_streak import FailureStreak
from penstock.loop.group_log import MemoryGroupLog
from penstock.loop.group_production import GroupProduction
from penstock.loop.history import HistoryState, VersionHistory
from penstock.loop.resume import Resume
from penstock.loop.rollout_buffer import RolloutBuffer
from penstock.observe.event_stream import EventStream
from penstock.planner.simulation import (
    SimulatedEngine,
    SimulatedScorer,
    SimulatedTokenizer,
)
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import PartialGroup, SamplingParams, Score
from penstock.rollout.episode_runner import LocalEpisodes
from penstock.rollout.group_runner import RolloutRunner
from tests.loop.simulated_parts import Tasks
from tests.run.test_controller_events import events_of


class World:
    """Production with simulated workers; what each drop was told for."""

    def __init__(self, *, values: Any = None, resume: Resume | None = None, **settings: Any) -> None:
        gate = StalenessGate(
            groups_per_step=1, max_staleness=3, late="correct", ahead=9, history=VersionHistory(steps=[0])
        )
        if resume is not None:
            gate.restore(resume.gate)
        self.log = MemoryGroupLog()
        self.drops: list[tuple[int, str]] = []
        self.buffer = RolloutBuffer(
            gate, log=self.log, dropped=lambda group, reason, *rest: self.drops.append((group.number, reason))
        )
        self.scored: list[int] = []
        self.tasks = Tasks()

        def value(task: Any, episode: Any) -> float:
            self.scored.append(episode.index)
            return float(values(episode)) if values else float(episode.index)

        engine = SimulatedEngine(num_tokens=lambda: 2, token_s=lambda: 0.01, update_s=lambda: 0.01)
        loop = asyncio.get_running_loop()
        self.production = GroupProduction(
            runner=RolloutRunner(
                LocalEpisodes(engine, SimulatedTokenizer()),
                sampling=SamplingParams(max_tokens=9),
                group_size=2,
                timeout_s=9.0,
            ),
            scorer=SimulatedScorer(score_s=lambda: 0.01, value=value),
            tasks=self.tasks,
            buffer=self.buffer,
            failures=FailureStreak(9),
            blobs=MemoryBlobs(),
            events=events_of(EventStream(loop), gate, self.log.attempts),
            resume=resume,
            **{"selection": {}, **settings},
        )

    async def first_step(self) -> tuple[int, ...]:
        try:
            async with asyncio.TaskGroup() as background:
                feeding = background.create_task(self.production.feed(background))
                try:
                    numbers = (await self.buffer.take_step()).numbers
                    assert self.tasks.returned == []  # nothing grows old here
                    return numbers
                finally:
                    feeding.cancel()
                    self.production.cancel()
        except* UserError as errors:
            raise errors.exceptions[0] from None
        raise AssertionError


def test_a_group_goes_from_its_task_to_the_buffer() -> None:
    async def main() -> None:
        world = World()
        assert await world.first_step() == (0,)
        attempt = world.log.attempts.by_number[0]
        assert (attempt.task_id, attempt.state, attempt.selected_at) == ("t0", "scored", 0)
        assert (
            attempt.began_s is not None and attempt.generated_s is not None and attempt.scored_s is not None
        )
        assert attempt.began_s < attempt.generated_s < attempt.scored_s
        assert world.drops == []

    run_in_virtual_time(main())


def test_what_selection_leaves_out_is_dropped_until_nothing_is_left_to_learn_from() -> None:
    async def main() -> None:
        world = World(values=lambda episode: 1, selection={"zero_variance": {}}, max_filtered_in_a_row=2)
        with pytest.raises(UserError, match=r"the last \d groups were all dropped by selection"):
            await world.first_step()
        assert sorted(world.drops)[:2] == [(0, "zero_variance"), (1, "zero_variance")]
        assert world.buffer.gate.num_ready == 0

    run_in_virtual_time(main())


def test_a_group_from_before_a_restart_goes_on_with_what_it_has() -> None:
    async def main() -> None:
        held = Ticket(number=4, bound=3, deadline=3)
        gate = GateState(
            step=0,
            served_step=0,
            max_staleness=3,
            num_admitted=5,
            num_trained=0,
            running=(held,),
            ready=(),
        )
        first = World()
        await first.first_step()
        group = first.buffer.gate.state().ready[0].scored.group
        done = PartialGroup(episodes={0: group.episodes[0]}, scores={0: Score(value=7.0)})
        resume = Resume(
            gate=gate,
            history=HistoryState(policy="policy", steps=(0,)),
            task_ids={4: "old"},
            partial={4: done},
        )
        world = World(resume=resume)
        world.log.attempts.by_number[4] = Attempt(held, "old")
        assert await world.first_step() == (4,)
        (ready,) = world.buffer.gate.state().ready[:1]
        assert ready.scored.group.episodes[0] == group.episodes[0]
        assert [score.value for score in ready.scored.scores] == [7.0, 1.0]
        assert world.log.attempts.by_number[4].task_id == "old"

    run_in_virtual_time(main())
