"""Folds a run's events into the state behind the terminal view, `metrics.jsonl`, the trackers and
`summary.json`. It does no I/O, so the same events always make the same state, live or from a file."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from penstock.observe.events import (
    PREPARING,
    AnyEvent,
    CheckpointEvent,
    Counters,
    Doing,
    Drop,
    EvaluationEvent,
    PhaseEvent,
    RunEvent,
    SampleEvent,
    Span,
    StepEvent,
    UpdateEvent,
)
from penstock.observe.process_state import ProcessState
from penstock.observe.status import (
    AgeStatus,
    AnswerStatus,
    Bottleneck,
    BottleneckStatus,
    ExpertStatus,
    FlowStatus,
    ProcessStatus,
    RunStatus,
    SampleStatus,
)
from penstock.observe.time_sheet import CONTROLLER, TRAINER, TimeSheet

RECENT_STEPS = 8
PACE_STEPS = 32
"""Recent steps from which the remaining time is estimated."""
KEPT_REWARDS = 200
TOKENS_OF_AGE = "tokens_age_"


class RunState:
    """Folds events, as a `penstock.observe.event_stream.Reader`. With `makes_rows=False` the caller sets `row`."""

    def __init__(self, *, makes_rows: bool = True) -> None:
        self.name = ""
        self.folder = ""
        self.steps_planned = 0
        self.started = self.now = 0.0
        self.phase = PREPARING
        self.time_sheet = TimeSheet()
        self.step = 0
        """The last step."""
        self.num_steps = 0
        self.num_samples = 0
        self.rewards: deque[float] = deque(maxlen=KEPT_REWARDS)
        self.first_reward: float | None = None
        self.heldout: list[tuple[int, float]] = []
        self.staleness = self.staleness_sum = self.staleness_max = 0.0
        self.staleness_bound: int | None = None
        self.last_sample: SampleEvent | None = None
        """The newest sample that was scored."""
        self.drops: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Failed episodes, by reason."""
        self.stalls: list[float] = []
        """Stall seconds of every update since training began."""
        self.processes: dict[str, ProcessState] = {TRAINER: ProcessState(TRAINER)}
        self.last_progress = 0.0
        """When a group was last scored or a step trained."""
        self.row: dict[str, float] = {}
        """The metrics of the last step, by the names of `metrics.jsonl`."""
        self.own_metrics: dict[str, float] = {}
        """The metrics of the last step that a user's loss reports."""
        self._makes_rows = makes_rows
        self._pace: deque[float] = deque(maxlen=PACE_STEPS + 1)
        """When training began, then when the last steps ended."""
        self._updates: list[UpdateEvent] = []
        """Updates since the last step."""
        self._written: CheckpointEvent | None = None
        """The last checkpoint that became durable since the last step."""
        self.failed_checkpoints: tuple[int, int, str] | None = None
        """How many checkpoints could not be written, the step of the last one, and why."""
        self._last_checkpoint_failed = False
        self.num_skipped = 0
        """Versions that were never sent because newer ones replaced them."""
        self._bottleneck = Bottleneck()
        self._handlers: dict[type, Callable[[Any], None]] = {
            RunEvent: self._on_run,
            PhaseEvent: self._on_phase,
            Span: self._on_span,
            Counters: self._on_counters,
            Doing: self._on_doing,
            Drop: self._on_drop,
            SampleEvent: self._on_sample,
            StepEvent: self._on_step,
            UpdateEvent: self._on_update,
            EvaluationEvent: self._on_evaluation,
            CheckpointEvent: self._on_checkpoint,
        }

    def on(self, event: AnyEvent) -> None:
        self.now = max(self.now, event.time)
        handle = self._handlers.get(type(event))
        if handle is not None:
            handle(event)

    def close(self) -> None:
        pass

    @property
    def engines(self) -> list[ProcessState]:
        return [process for process in self.processes.values() if process.is_engine]

    @property
    def recent_reward(self) -> float | None:
        """Return the mean reward of the last `RECENT_STEPS` steps."""
        recent = list(self.rewards)[-RECENT_STEPS:]
        return sum(recent) / len(recent) if recent else None

    @property
    def tokens_per_s(self) -> float:
        return sum(engine.tokens.rate for engine in self.engines)

    @property
    def left_s(self) -> float | None:
        """Return the seconds until the last step, at the pace of recent steps. They shrink while a step is under
        way."""
        if self.phase != "training" or len(self._pace) < 2:
            return None
        step_s = (self._pace[-1] - self._pace[0]) / (len(self._pace) - 1)
        return max(0.0, (self.steps_planned - self.step) * step_s - (self.now - self._pace[-1]))

    def loss_counts(self) -> dict[str, float]:
        """Return the counts so far as rows of metrics have them: `dropped_REASON` of groups, `failed_REASON` of
        episodes."""
        return {
            **{f"dropped_{reason}": float(count) for reason, count in sorted(self.drops.items())},
            **{f"failed_{reason}": float(count) for reason, count in sorted(self.failures.items())},
        }

    def status(self) -> RunStatus:
        return RunStatus(
            name=self.name,
            phase=self.phase,
            elapsed_s=self.now - self.started,
            left_s=self.left_s,
            step=self.step,
            steps=self.steps_planned,
            reward=self.recent_reward,
            rewards=tuple(self.rewards),
            first_reward=self.first_reward,
            heldout=tuple(self.heldout),
            tokens_per_s=self.tokens_per_s,
            staleness_mean=self.staleness,
            staleness_max=self.staleness_max,
            staleness_bound=self.staleness_bound,
            ages=ages_of(self.row),
            samples=self.num_samples,
            drops=dict(self.drops),
            failed_checkpoints=self.failed_checkpoints if self._last_checkpoint_failed else None,
            processes=tuple(
                ProcessStatus(name=one.name, busy=min(1.0, one.busy.rate), doing=one.doing)
                for one in (self.processes[TRAINER], *self.engines)
            ),
            flow=self._flow(),
            bottleneck=self._limit(),
            answers=self._answers(),
            experts=self._experts(),
            own_metrics=self.own_metrics,
            last_sample=self._last_sample(),
        )

    def _limit(self) -> BottleneckStatus | None:
        if self.phase != "training":
            return None
        engines = self.engines
        busy = sum(min(1.0, engine.busy.rate) for engine in engines) / max(1, len(engines))
        return self._bottleneck.status(engines_work=busy, max_staleness=self.staleness_bound)

    def _flow(self) -> FlowStatus | None:
        controller = self.processes.get(CONTROLLER)
        if (
            controller is None
            or not {"generating", "scoring", "ready", "limit"} <= controller.counters.keys()
        ):
            return None
        counters = controller.counters
        return FlowStatus(
            generating=int(counters["generating"]),
            scoring=int(counters["scoring"]),
            ready=int(counters["ready"]),
            limit=int(counters["limit"]),
        )

    def _answers(self) -> AnswerStatus | None:
        if "answer_tokens_mean" not in self.row:
            return None
        return AnswerStatus(
            tokens_mean=self.row["answer_tokens_mean"],
            tokens_max=self.row["answer_tokens_max"],
            truncated=self.row["truncated_fraction"],
        )

    def _experts(self) -> ExpertStatus | None:
        if "routing_replayed" not in self.row:
            return None
        return ExpertStatus(
            replayed=self.row["routing_replayed"],
            flipped=self.row.get("routing_flipped"),
            gap=self.row.get("routing_gap"),
            gap_without=self.row.get("routing_gap_without"),
        )

    def _last_sample(self) -> SampleStatus | None:
        sample = self.last_sample
        if sample is None or sample.reward is None:
            return None
        return SampleStatus(
            reward=sample.reward,
            prompt=sample.prompt,
            text=sample.answer,
            oldest_version=sample.oldest_version,
            newest_version=sample.newest_version,
        )

    def _on_run(self, event: RunEvent) -> None:
        self.time_sheet.on(event)
        self.name, self.folder, self.steps_planned = event.name, event.folder, event.steps
        self.started = event.time
        self.step, self.heldout = event.step, list(event.heldout)

    def _on_phase(self, event: PhaseEvent) -> None:
        self.time_sheet.on(event)
        self.phase = event.phase
        if event.phase == "training":
            self.last_progress = event.time
            self._pace.append(event.time)
            self._bottleneck = Bottleneck()  # an evaluation says nothing about training
            self.processes[TRAINER].work(event.time, {})

    def _on_span(self, event: Span) -> None:
        if event.name == "score":
            self.last_progress = max(self.last_progress, event.time)

    def _on_counters(self, event: Counters) -> None:
        self.time_sheet.on(event)
        self._process(event.process).count(event.time, event.values, trains=self.phase == "training")
        self._bottleneck.on_counters(event.values)

    def _on_doing(self, event: Doing) -> None:
        self._process(event.process).doing = event.what

    def _on_drop(self, event: Drop) -> None:
        self.drops[event.reason] += 1

    def _on_sample(self, event: SampleEvent) -> None:
        if event.failure is not None:
            self.failures[event.failure] += 1
        elif event.reward is not None:
            self.last_sample = event

    def _on_step(self, event: StepEvent) -> None:
        self.step = event.step
        self.num_steps += 1
        self.num_samples += event.num_samples
        self._pace.append(event.time)
        self.rewards.append(event.reward)
        if self.first_reward is None:
            self.first_reward = event.reward
        self.staleness = event.metrics.get("staleness_mean", 0.0)
        self.staleness_sum += self.staleness
        self.staleness_max = max(self.staleness_max, event.metrics.get("staleness_max", 0.0))
        self.staleness_bound = event.max_staleness
        self.own_metrics = {name: event.metrics[name] for name in event.own_metrics}
        self._bottleneck.on_step(event.waited_s, event.took_s)
        self.time_sheet.on(event)
        self.processes[TRAINER].work(event.time, event.seconds)
        self.last_progress = max(self.last_progress, event.time)
        if self._makes_rows:
            self.row = self._row(event)
        self._updates.clear()
        self._written = None

    def _row(self, event: StepEvent) -> dict[str, float]:
        return {
            "time_s": event.time - self.started,
            "reward": event.reward,
            **event.metrics,
            **{f"{part}_s": value for part, value in event.seconds.items()},
            **self._sync_row(),
            **self._checkpoint_row(),
            "max_staleness": float(event.max_staleness),
            "waited_s": event.waited_s,
            "step_s": event.took_s,
            "samples": float(self.num_samples),
            "tokens_per_s": self.tokens_per_s,
            **self.loss_counts(),
        }

    def _sync_row(self) -> dict[str, float]:
        """Merge the updates since the last step: the longest times, and sums of what was sent or lost. Only
        `sync_skipped` counts the whole session. Losses of zero are left out."""
        updates = self._updates
        if not updates:
            return {}
        row = {
            "sync_transfer_s": max(update.transfer_s for update in updates),
            "sync_stall_s": max(update.stall_s for update in updates),
            "sync_fingerprint_s": max(update.verify_s for update in updates),
            "sync_fresh_s": max(update.fresh_s for update in updates),
            "sync_bytes": float(sum(update.num_bytes for update in updates)),
        }
        lost = {
            "sync_drain_s": max(update.drain_s for update in updates),
            "sync_recomputed_tokens": float(sum(update.recomputed_tokens for update in updates)),
            "sync_discarded_tokens": float(sum(update.discarded_tokens for update in updates)),
            "sync_skipped": float(self.num_skipped),
        }
        return row | {name: value for name, value in lost.items() if value}

    def _checkpoint_row(self) -> dict[str, float]:
        if self._written is None:
            return {}
        return {
            "checkpoint_write_s": self._written.write_s,
            "checkpoint_bytes": float(self._written.num_bytes),
        }

    def _on_update(self, event: UpdateEvent) -> None:
        self.time_sheet.on(event)
        # Before training, no request is under way that an update could delay.
        if event.version > 0 and self.phase != "verifying weights":
            self.stalls.append(event.stall_s)
            self._updates.append(event)
            self.num_skipped += event.num_skipped

    def _on_evaluation(self, event: EvaluationEvent) -> None:
        self.heldout.append((event.step, event.reward))

    def _on_checkpoint(self, event: CheckpointEvent) -> None:
        self._last_checkpoint_failed = bool(event.failure)
        if event.failure:
            number = 1 if self.failed_checkpoints is None else self.failed_checkpoints[0] + 1
            self.failed_checkpoints = (number, event.step, event.failure)
        else:
            self._written = event

    def _process(self, name: str) -> ProcessState:
        if name not in self.processes:
            self.processes[name] = ProcessState(name)
        return self.processes[name]


def ages_of(metrics: Mapping[str, float]) -> tuple[AgeStatus, ...]:
    """Return the shares of tokens by age (`tokens_age_1`, `tokens_age_2_3`, `tokens_age_32_up`), youngest first."""
    found = []
    for name, share in metrics.items():
        if name.startswith(TOKENS_OF_AGE):
            first, _, last = name.removeprefix(TOKENS_OF_AGE).partition("_")
            until = None if last == "up" else int(last or first)
            found.append(AgeStatus(first=int(first), last=until, share=share))
    return tuple(sorted(found, key=lambda age: age.first))
