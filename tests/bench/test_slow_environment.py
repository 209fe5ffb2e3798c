"""Rollouts that wait: training episodes do, held-out ones do not, and what they took is kept."""

import asyncio

import numpy as np
import pytest

from penstock.bench.slow_environment import SlowEnvironment, answer_times, measured_step_s
from penstock.engines.scripted import ScriptedEngine
from penstock.planner.simulation import SimulatedTokenizer
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import SamplingParams, Task
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.episode_spec import EVALUATION, TRAINING, EpisodeSpec
from tests.bench.summaries import make_summary


class SevenSeconds:
    def draw(self) -> float:
        return 7.0


@pytest.mark.parametrize(("label", "waited_s"), [(TRAINING, 7.0), (EVALUATION, 0.0)])
def test_only_training_episodes_wait(label: str, waited_s: float) -> None:
    async def attempt() -> tuple[float, list[int], int]:
        task = Task(id="t", prompt="1+1=")
        spec = EpisodeSpec(group=0, index=0, task=task, sampling=SamplingParams(max_tokens=4), label=label)
        rollout = Rollout(spec, ScriptedEngine(lambda _: [3, 4]), SimulatedTokenizer())
        environment = SlowEnvironment(SevenSeconds())
        turn = await environment.run(task, rollout)
        return asyncio.get_running_loop().time(), turn.output_ids.tolist(), len(environment.answer_s)

    now, output, num_kept = run_in_virtual_time(attempt())
    assert now == pytest.approx(waited_s)
    assert output == [3, 4]
    assert num_kept == (1 if label == TRAINING else 0)


def test_the_trainers_own_time_leaves_out_what_it_waited() -> None:
    assert measured_step_s(make_summary(steps=10, training_s=5.0, trainer_worked=0.2)) == pytest.approx(0.1)


def test_answer_times_are_the_median_and_the_slowest_tenth() -> None:
    times = answer_times(list(np.repeat([1.0, 25.0], [18, 2])))
    assert times == {"answer_median_s": 1.0, "answer_slowest_tenth_s": 25.0}
    assert answer_times([]) == {}
