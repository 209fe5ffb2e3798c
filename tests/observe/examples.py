"""One event of every kind, and a clock that is set by hand."""

import numpy as np

from penstock.observe.events import (
    AnyEvent,
    CheckpointEvent,
    ConfigEvent,
    Counters,
    Doing,
    Drop,
    EvaluationEvent,
    LogLine,
    PhaseEvent,
    RecoveryEvent,
    RunEvent,
    SampleEvent,
    Span,
    StalenessEvent,
    StepEvent,
    TokensEvent,
    TokenTexts,
    TurnText,
    UpdateEvent,
)
from penstock.observe.status import (
    AgeStatus,
    AnswerStatus,
    BottleneckStatus,
    FlowStatus,
    ProcessStatus,
    RunStatus,
    SampleStatus,
)


class HandClock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def time(self) -> float:
        return self.now


def run_event(time: float = 100.0) -> RunEvent:
    return RunEvent(process="controller", time=time, name="demo", folder="runs/demo", steps=9, wall_s=1.7e9)


def phase(name: str, time: float) -> PhaseEvent:
    return PhaseEvent(process="controller", time=time, phase=name)


def step(number: int, time: float, *, forward: float = 0.25, reward: float = 0.5) -> StepEvent:
    return StepEvent(
        process="controller",
        time=time,
        step=number,
        reward=reward,
        num_samples=4,
        metrics={"loss": 2.0, "staleness_mean": 1.5, "staleness_max": float(number)},
        seconds={"forward": forward, "prepare": 0.125},
        waited_s=0.5,
        took_s=1.0,
        max_staleness=4,
    )


def drop(reason: str, time: float = 103.0, group: int = 7) -> Drop:
    return Drop(process="controller", time=time, group=group, task_id="t", reason=reason, message="why")


def update(version: int, stall_s: float, time: float = 103.0) -> UpdateEvent:
    return UpdateEvent(
        process="controller",
        time=time,
        policy="policy",
        version=version,
        publish_s=0.25,
        stage_s=0.125,
        stall_s=stall_s,
        verify_s=0.0625,
        fresh_s=2.0,
        num_bytes=1024,
    )


def counters(process: str, time: float, **values: float) -> Counters:
    return Counters(process=process, time=time, values=values)


SAMPLE = SampleEvent(
    process="controller",
    time=104.0,
    group=3,
    episode=1,
    task_id="t",
    step=2,
    reward=1.0,
    parts={"exact": 1.0},
    oldest_version=4,
    newest_version=5,
    num_turns=1,
    num_prompt_tokens=3,
    num_output_tokens=8,
    finish_reason="stop",
    prompt="12 × 7",
    answer="84",
)


TURNS = (
    TurnText(turn=0, role="context", text="<|user|>12 × 7<|end|><|model|>"),
    TurnText(turn=0, role="model", text="<call>mul(12, 7)</call><|end|>"),
    TurnText(turn=1, role="context", text="<|tool|>84<|end|><|model|>", after=0),
    TurnText(turn=1, role="model", text="84<|end|>"),
)


def column(kind: str, *values: float) -> bytes:
    return np.array(values, kind).tobytes()


TOKENS = TokensEvent(
    process="controller",
    time=104.0,
    step=2,
    group=3,
    episode=1,
    sample=0,
    token_ids=column("<i4", 7, 8, 9, 7),
    versions=column("<i4", -1, 4, 5, 5),
    ages=column("<i4", -1, 2, 1, 1),
    loss_mask=column("u1", 0, 1, 1, 0),
    logprobs=column("<f4", 0, -1, -2, -3),
    gaps=column("<f4", 0.5, -0.75),
    advantages=column("<f4", 1.5, 1.5),
    weights=column("<f4", 1, 0.5),
    clipped=column("u1", 0, 1),
)
TEXTS = TokenTexts(process="controller", time=104.0, texts={7: "a", 8: "b", 9: "<script>"})
STALENESS = StalenessEvent(
    process="controller",
    time=104.0,
    step=2,
    tokens=((0, 1, 10), (1, 1, 5), (2, 0, 1)),
    groups=((1, 2), (2, 1)),
)

ONE_OF_EACH: tuple[AnyEvent, ...] = (
    run_event(),
    ConfigEvent(process="controller", time=100.0, config='{"run": {"seed": 3}}', num_gpus=2),
    phase("training", 101.0),
    Span(process="trainer", time=102.0, track="step", name="forward", start=101.0, attributes={"step": 1}),
    counters("engine0", 102.0, tokens=5.0, busy_s=0.5),
    Doing(process="engine0", time=102.0, what="3 running, 0 waiting"),
    drop("stale"),
    SAMPLE,
    TEXTS,
    TOKENS,
    STALENESS,
    step(1, 104.0),
    update(1, 0.25),
    EvaluationEvent(process="controller", time=105.0, step=1, reward=0.75, num_episodes=8, num_failed=0),
    CheckpointEvent(process="controller", time=105.0, step=1, write_s=0.5, num_bytes=64),
    RecoveryEvent(
        process="controller", time=105.0, worker="engine0", incarnation=2, cause="it was killed", took_s=3.5
    ),
    LogLine(process="controller", time=105.0, line="a line"),
)

STATUS = RunStatus(
    name="demo",
    phase="training",
    elapsed_s=12.0,
    left_s=75.0,
    step=3,
    steps=10,
    reward=0.25,
    rewards=(0.0, 0.5, 1.0),
    first_reward=0.0,
    heldout=((0, 0.3), (2, 0.4), (3, 0.5)),
    tokens_per_s=1234.5,
    staleness_mean=1.5,
    staleness_max=3,
    staleness_bound=4,
    ages=(AgeStatus(first=1, last=1, share=0.5), AgeStatus(first=2, last=3, share=0.5)),
    samples=192,
    drops={"score_error": 2},
    processes=(
        ProcessStatus(name="trainer", busy=0.25, doing="waiting for groups: 5 of 8 groups ready, 3 running"),
        ProcessStatus(name="engine0", busy=1.0, doing="24 running, 0 waiting"),
    ),
    bottleneck=BottleneckStatus(who="engines", why="trainer waits for groups 49% of the time"),
    flow=FlowStatus(generating=64, scoring=10, ready=38, limit=80),
    answers=AnswerStatus(tokens_mean=14.2, tokens_max=32, truncated=0.02),
    last_sample=SampleStatus(
        reward=1.0, prompt="What is\n12 × 7 = ", text="84", oldest_version=1, newest_version=2
    ),
)
