from msgspec.structs import replace

from penstock.observe.events import LogLine, SampleEvent
from penstock.orchestration.reward_watch import RewardWatch
from penstock.tasks.curriculum import Curriculum
from penstock.types import Task

SAMPLE = SampleEvent(
    process="controller",
    time=0.0,
    group=0,
    episode=0,
    task_id="t",
    step=1,
    reward=0.5,
    num_turns=1,
    num_prompt_tokens=1,
    num_output_tokens=1,
    finish_reason="stop",
    prompt="",
    answer="",
)


def test_only_answers_that_were_trained_count() -> None:
    seen: list[dict[str, float]] = []
    task = Task(id="t", prompt="p", columns={"kind": "easy"})
    curriculum = Curriculum(lambda task, rewards: not seen.append(dict(rewards)), [task])
    watch = RewardWatch(curriculum)
    for event in (
        SAMPLE,
        replace(SAMPLE, reward=1.0),
        replace(SAMPLE, step=None, drop="failed_episodes", reward=9.0),
        replace(SAMPLE, reward=None),
        LogLine(process="controller", time=0.0, line="hi"),
    ):
        watch.on(event)
    assert curriculum.admits(task)
    assert seen == [{"easy": 0.75}]
    watch.close()
