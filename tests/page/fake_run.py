"""A run in memory, as `penstock.observe.reading` gives one: made-up numbers that hang together, and hostile texts."""

import math
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from penstock.observe.events import Drop, EvaluationEvent, LogLine, SampleEvent, Span, UpdateEvent
from penstock.observe.reading.counter_series import Series
from penstock.observe.reading.step_table import Bucket
from penstock.observe.status import (
    AnswerStatus,
    BottleneckStatus,
    FlowStatus,
    ProcessStatus,
    RunStatus,
    SampleStatus,
)
from penstock.observe.time_sheet import ProcessTime
from tests.observe.examples import TURNS

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    " \x1b[31mred\x1b[0m \u202eright to left [link](javascript:alert(1)) {{7*7}} ${7*7}"
)
GROUPS, GROUP_SIZE = 4, 4


@dataclass(frozen=True)
class FakeTrace:
    step: int
    group: int
    episode: int
    sample: int
    token_ids: Any
    texts: list[str]
    versions: Any
    loss_mask: Any
    ages: Any
    engine_logprobs: Any
    trainer_logprobs: Any
    gaps: Any
    ratios: Any
    clipped: Any
    weights: Any
    advantages: Any

    @property
    def worst(self) -> int | None:
        return None if np.isnan(self.gaps).all() else int(np.nanargmax(np.abs(self.gaps)))


def fake_trace(
    count: int, step: int = 3, group: int = 0, episode: int = 0, texts: list[str] | None = None
) -> FakeTrace:
    chance = np.random.default_rng(count)
    words = texts or [
        "the",
        " answer",
        " is",
        " 42",
        ",",
        " so",
        " 12",
        "×",
        "7",
        " =",
        " 84",
        ".\n",
        " then",
    ]
    pieces = [words[index % len(words)] for index in range(count)]
    engine = -chance.gamma(0.6, 0.8, count)
    gaps = chance.normal(0, 0.01, count)
    gaps[count // 2] = -1.7
    mask = np.ones(count, bool)
    mask[:3] = False
    return FakeTrace(
        step=step,
        group=group,
        episode=episode,
        sample=0,
        token_ids=chance.integers(0, 30_000, count).astype(np.int32),
        texts=pieces,
        versions=(step - 3 + np.arange(count) * 3 // max(1, count)).astype(np.int32),
        loss_mask=mask,
        ages=(3 - np.arange(count) * 3 // max(1, count)).astype(np.int32),
        engine_logprobs=engine.astype(np.float32),
        trainer_logprobs=(engine + gaps).astype(np.float32),
        gaps=np.where(mask, gaps, np.nan).astype(np.float32),
        ratios=np.exp(gaps).astype(np.float32),
        clipped=(np.abs(gaps) > 0.02).astype(np.uint8),
        weights=np.minimum(np.exp(gaps), 2).astype(np.float32),
        advantages=np.full(count, 0.7, np.float32),
    )


class FakeSteps:
    def __init__(self, count: int) -> None:
        self.numbers = np.arange(1, count + 1)
        self.times = self.numbers * 0.4
        share = self.numbers / max(1, count)
        self._columns = {
            "reward": 0.2 + 0.7 * share + 0.03 * np.sin(self.numbers),
            "kl": 0.001 * share,
            "ess": 1 - 0.05 * share,
            "staleness_mean": 1 + share,
            "tokens_age_1": 1 - share / 2,
            "tokens_age_2_3": share / 2,
            "ess_age_1": 1 - 0.01 * share,
            "ess_age_2_3": 1 - 0.1 * share,
            "kl_age_1": 0.001 * share,
            "ratio_p99_age_2_3": np.full(count, np.e),
        }
        self.names = list(self._columns)

    def add(self) -> None:
        last = int(self.numbers[-1]) + 1
        self.numbers = np.append(self.numbers, last)
        self.times = np.append(self.times, last * 0.4)
        self._columns = {name: np.append(values, values[-1]) for name, values in self._columns.items()}

    @property
    def stored(self) -> list[Any]:
        steps = zip(self.numbers.tolist(), self.times.tolist(), strict=True)
        return [SimpleNamespace(step=step, time=time) for step, time in steps]

    @property
    def last(self) -> Any:
        return self.stored[-1]

    def row(self, index: int) -> dict[str, float]:
        return {name: float(values[index]) for name, values in self._columns.items()}

    def column(self, name: str) -> Any:
        return self._columns[name]

    def thinned(self, name: str, x: str = "step", buckets: int = 500) -> list[Bucket]:
        xs = {"step": self.numbers, "time": self.times, "tokens": self.numbers * 512}[x]
        size = max(1, math.ceil(len(xs) / buckets))
        values = self._columns[name]
        return [
            Bucket(
                x=float(xs[start : start + size][-1]),
                low=float(values[start : start + size].min()),
                high=float(values[start : start + size].max()),
                mean=float(values[start : start + size].mean()),
            )
            for start in range(0, len(xs), size)
        ]


class FakeSamples:
    def __init__(self, events: list[SampleEvent], ages: list[int]) -> None:
        self._events = events
        self.drop_names = ["", "too old"]
        self.task_names = ["", *sorted({event.task_id for event in events})]
        self.failure_names, self.finish_names = ["", "timeout"], ["", "stop", "length"]
        self.columns = {
            "number": np.arange(len(events)),
            "step": np.array([-1 if event.step is None else event.step for event in events]),
            "group": np.array([event.group for event in events]),
            "episode": np.array([event.episode for event in events]),
            "reward": np.array([math.nan if event.reward is None else event.reward for event in events]),
            "tokens": np.array([event.num_output_tokens for event in events]),
            "age": np.array(ages),
            "drop": np.array([self.drop_names.index(event.drop or "") for event in events]),
            "task": np.array([self.task_names.index(event.task_id) for event in events]),
            "failure": np.zeros(len(events), int),
            "finish": np.ones(len(events), int),
            "traced": np.array([event.step is not None for event in events]),
        }

    def __len__(self) -> int:
        return len(self._events)

    def read(self, row: int) -> SampleEvent:
        return self._events[row]

    def select(
        self, *, steps: Any = None, group: Any = None, drop: Any = None, task: Any = None, **ranges: Any
    ) -> Any:
        fits = np.ones(len(self), bool)
        for name, wanted in {"step": steps, **ranges}.items():
            if wanted is not None:
                fits &= (self.columns[name] >= wanted[0]) & (self.columns[name] <= wanted[1])
        if group is not None:
            fits &= self.columns["group"] == group
        if drop is not None:
            code = self.columns["drop"]
            fits &= {"any": code > 0, "none": code == 0}.get(drop, code == 1)
        if task is not None:
            fits &= self.columns["task"] == self.task_names.index(task)
        return np.flatnonzero(fits)

    def histogram(self, column: str, rows: Any = None, bins: int = 30) -> Any:
        values = self.columns[column] if rows is None else self.columns[column][rows]
        counts, edges = np.histogram(values[np.isfinite(values)], bins)
        return edges, counts


class FakeState:
    phase = "training"

    def __init__(self, run: "FakeRun") -> None:
        self._run = run

    def status(self) -> RunStatus:
        reward = self._run.steps.column("reward")
        return RunStatus(
            name=self._run.name,
            phase=self.phase,
            elapsed_s=float(self._run.steps.times[-1]),
            left_s=42.0,
            step=int(self._run.steps.numbers[-1]),
            steps=200,
            reward=float(reward[-1]),
            rewards=tuple(reward[-200:].tolist()),
            first_reward=float(reward[0]),
            heldout=((0, 0.26), (40, 0.71)),
            tokens_per_s=7714.0,
            staleness_mean=2.4,
            staleness_max=4.0,
            staleness_bound=4,
            samples=len(self._run.samples),
            drops={"too old": len(self._run.drops)},
            processes=(
                ProcessStatus(name="trainer", busy=0.51, doing="waiting for groups: 5 of 8 ready"),
                ProcessStatus(name="engine0", busy=0.64, doing="24 running, 0 waiting"),
            ),
            flow=FlowStatus(generating=64, scoring=10, ready=38, limit=80),
            bottleneck=BottleneckStatus(who="engines", why="trainer waits for groups 49% of the time"),
            answers=AnswerStatus(tokens_mean=14, tokens_max=32, truncated=0.02),
            last_sample=SampleStatus(
                reward=1.0, prompt=HOSTILE, text=HOSTILE, oldest_version=74, newest_version=76
            ),
        )


class FakeRun:
    """`RunReading` of a made-up run."""

    def __init__(self, name: str = "demo", num_steps: int = 40) -> None:
        self.name, self.folder = name, Path("runs") / name
        self.is_running, self.revision, self.started_s = True, 1, 1.79e9
        self.steps = FakeSteps(num_steps)
        self.config: dict[str, Any] = {"run": {"name": name, "steps": 200}, "staleness": {"max_staleness": 4}}
        self.evaluations = [
            EvaluationEvent(process="controller", time=0, step=0, reward=0.26, num_episodes=512, num_failed=0)
        ]
        self.updates = [
            UpdateEvent(
                process="controller",
                time=step * 0.4,
                policy="policy",
                version=step,
                stage_s=0.01,
                stall_s=0.002,
                verify_s=0.001,
            )
            for step in range(1, num_steps)
        ]
        self.lines = [LogLine(process="controller", time=1.0, line=HOSTILE)]
        self.recoveries: list[Any] = []
        events, ages = self._samples(num_steps)
        self.samples = FakeSamples(events, ages)
        self.drops = self._drops(num_steps)
        self.step_of_group = {
            step * GROUPS + group: step for step in range(1, num_steps + 1) for group in range(GROUPS - 1)
        }
        self.state = FakeState(self)
        self.has_news = False
        self.num_tokens = 40

    @property
    def now(self) -> float:
        return float(self.steps.times[-1])

    def status(self) -> RunStatus:
        return self.state.status()

    def rows_of_drop(self, drop: Drop) -> Any:
        return self.samples.select(group=drop.group)

    def refresh(self) -> bool:
        found, self.has_news = self.has_news, False
        return found

    def add_step(self) -> None:
        self.steps.add()
        self.revision += 1
        self.has_news = True

    def _samples(self, num_steps: int) -> tuple[list[SampleEvent], list[int]]:
        chance = random.Random(0)
        events, ages = [], []
        for step in range(1, num_steps + 1):
            for group in range(GROUPS):
                a, b = chance.randrange(1000), chance.randrange(1000)
                dropped = group == GROUPS - 1
                for episode in range(GROUP_SIZE):
                    right = chance.random() < 0.2 + 0.7 * step / num_steps
                    answer = (
                        HOSTILE
                        if episode == 3 or dropped
                        else str(a + b if right else a + b + chance.randrange(1, 9))
                    )
                    ages.append(chance.randrange(4))
                    events.append(
                        SampleEvent(
                            process="controller", time=step * 0.4, group=step * GROUPS + group, episode=episode,
                            task_id=f"{a}+{b}", step=None if dropped else step, drop="too old" if dropped else None,
                            reward=float(right), parts={"exact_match": float(right), "<b>style</b>": 0.25},
                            advantage=None if dropped else 0.7, oldest_version=step - 3, newest_version=step - 1,
                            num_turns=1, num_prompt_tokens=8, num_output_tokens=chance.randrange(3, 9),
                            finish_reason="stop", prompt=f"{a}+{b}=", answer=answer, turns=TURNS if episode == 2 else (),
                        )
                    )  # fmt: skip
        return events, ages

    def _drops(self, num_steps: int) -> list[Drop]:
        return [
            Drop(
                process="controller",
                time=step * 0.4,
                group=step * GROUPS + GROUPS - 1,
                task_id="1+1",
                reason="too old",
                message="its oldest token is 5 updates old, and the bound is 4",
                age=5,
                num_tokens=20,
            )
            for step in range(1, num_steps + 1)
        ]

    def tokens(self, step: int, group: int, episode: int) -> list[FakeTrace]:
        texts = [HOSTILE] if episode == 3 else None
        return [fake_trace(self.num_tokens, step, group, episode, texts)] if step >= 0 else []

    def time_sheet(self) -> list[ProcessTime]:
        return [
            ProcessTime(
                process="trainer",
                total_s=80.0,
                parts={"work": 40.0, "sync": 2.0, "rest of the step": 8.0, "wait: generation": 30.0},
            ),
            ProcessTime(
                process="engine0",
                total_s=80.0,
                parts={"work": 52.0, "sync": 1.0, "idle: bound reached": 27.0},
            ),
        ]

    def cost(self) -> dict[str, Any]:
        return {
            "gpu_hours": 0.4,
            "tokens": 1_000_000,
            "tokens_training": 900_000,
            "tokens_per_gpu_hour": 2.5e6,
            "price": None,
            "num_gpus": 2,
        }

    @property
    def staleness(self) -> Any:
        bars = [
            SimpleNamespace(age=age, tokens=tokens, generating=age * 0.3, waiting=age * 0.7)
            for age, tokens in enumerate((900, 2400, 5100, 1200, 80))
        ]
        return SimpleNamespace(
            histogram=lambda first=None, last=None: bars,
            generating=lambda: {0: 7000, 1: 2600, 2: 80},
            waiting=lambda: {0: 1000, 1: 4000, 2: 4680},
            what_if=lambda drops=(): [
                SimpleNamespace(
                    bound=bound,
                    groups_too_old=40 - 9 * bound,
                    tokens_too_old=9000 - 2000 * bound,
                    drops_spared=bound,
                )
                for bound in range(5)
            ],
        )

    def spans(
        self, start: float = 0, end: float = 1e9, process: Any = None, track: Any = None, limit: int = 20_000
    ) -> list[Span]:
        found = []
        for step in range(1, int(self.steps.numbers[-1]) + 1):
            at = step * 0.4
            found.append(
                Span(
                    process="trainer",
                    time=at,
                    track="step",
                    name="step",
                    start=at - 0.3,
                    attributes={"step": step},
                )
            )
            for group in range(GROUPS):
                found.append(
                    Span(
                        process="controller",
                        time=at - 0.4,
                        track=f"slot {group}",
                        name="generate",
                        start=at - 0.75,
                        attributes={"group": step * GROUPS + group},
                    )
                )
        found.append(
            Span(
                process="engine0",
                time=3.0,
                track="slot 0",
                name="generate",
                start=2.5,
                attributes={"request": "g24.0.0"},
            )
        )
        return [span for span in found if span.time >= start and span.start <= end][:limit]

    @property
    def tracks(self) -> list[tuple[str, str, int]]:
        return [("trainer", "step", 40), *(("controller", f"slot {group}", 40) for group in range(GROUPS))]

    @property
    def counter_series(self) -> Any:
        return SimpleNamespace(processes=["trainer", "machine"])

    def counters(self, process: str) -> dict[str, Series]:
        times = self.steps.times
        if process != "machine":
            return {}
        return {"memory_bytes": Series(times, 1e9 + times), "cpu": Series(times, np.full(len(times), 0.8))}
