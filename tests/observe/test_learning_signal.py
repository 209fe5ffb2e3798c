from penstock.observe.event_stream import EventStream
from penstock.observe.events import LogLine, SampleEvent, StepEvent
from penstock.observe.learning_signal import FLAT_GROUPS, FLAT_STEPS, LearningSignal
from penstock.observe.readers import MemoryReader
from tests.observe.examples import HandClock


def sample(group: int, episode: int, reward: float | None) -> SampleEvent:
    return SampleEvent(
        process="controller",
        time=0.0,
        group=group,
        episode=episode,
        task_id="t",
        reward=reward,
        num_turns=1,
        num_prompt_tokens=1,
        num_output_tokens=1,
        finish_reason="stop",
        prompt="",
        answer="",
    )


def step(grad_norm: float, number: int = 1, **metrics: float) -> StepEvent:
    return StepEvent(
        process="controller",
        time=0.0,
        step=number,
        reward=0.0,
        num_samples=1,
        metrics={"grad_norm": grad_norm, **metrics},
        seconds={},
        waited_s=0.0,
        took_s=0.0,
        max_staleness=0,
    )


def lines(*events: SampleEvent | StepEvent) -> list[str]:
    stream, memory = EventStream(HandClock()), MemoryReader()
    stream.subscribe("memory", memory)
    stream.subscribe("signal", LearningSignal(stream.of("controller")))
    for event in events:
        stream.emit(event)
    return [event.line for event in memory.events if isinstance(event, LogLine)]


def groups(*rewards: tuple[float | None, ...], start: int = 0) -> list[SampleEvent]:
    return [
        sample(start + number, episode, reward)
        for number, group in enumerate(rewards)
        for episode, reward in enumerate(group)
    ]


def test_rewards_without_variance_are_told_once_with_the_likely_cause() -> None:
    (line,) = lines(*groups(*[(0.0, 0.0)] * (3 * FLAT_GROUPS)))
    assert line.startswith(
        f"the rewards of each of the last {FLAT_GROUPS} groups were all the same (the last: 0)"
    )
    assert "too hard" in line


def test_one_group_with_variance_begins_the_count_anew() -> None:
    flat = [(1.0, 1.0)] * (FLAT_GROUPS - 1)
    assert lines(*groups(*flat, (0.0, 1.0), *flat)) == []


def test_groups_of_one_and_groups_without_scores_say_nothing() -> None:
    assert lines(*groups(*[(1.0,)] * 500), *groups(*[(None, None)] * 500, start=500)) == []


def test_a_gradient_that_stays_zero_is_told_once() -> None:
    (line,) = lines(*[step(0.0)] * (3 * FLAT_STEPS))
    assert line.startswith(f"the gradient of the last {FLAT_STEPS} steps was zero")
    assert lines(*([step(0.0)] * (FLAT_STEPS - 1) + [step(0.1)]) * 3) == []


def test_what_is_not_finite_is_told_once() -> None:
    finite = step(0.1, nonfinite_logprobs=0.0, skipped_updates=0.0)
    assert lines(finite, finite) == []
    (line,) = lines(finite, step(0.1, 7, nonfinite_logprobs=3.0), step(0.1, 8, nonfinite_logprobs=5.0))
    assert line.startswith("3 logprobs of step 7 were not finite, and their sequences are out of the loss")
    (line,) = lines(finite, step(0.1, 7, skipped_updates=1.0), step(0.1, 8, skipped_updates=1.0))
    assert line.startswith("the update of step 7 was skipped")
    assert lines(step(0.1, 7, skipped_updates=2.0), step(0.1, 8, skipped_updates=2.0)) == []  # resumed
