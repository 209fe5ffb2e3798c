"""Watches a run: gathers what each process does, feeds the view and the metric writers, and raises the
alarm when nothing moves."""

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np

from penstock.interfaces import Engine
from penstock.observe.config import ObserveConfig
from penstock.observe.status import ProcessStatus, RunStatus
from penstock.observe.views import View
from penstock.observe.writers import MetricsWriter
from penstock.orchestration.controller import Controller
from penstock.orchestration.step_planner import TrainedStep
from penstock.types import EngineReport, UpdateReceipt

POLL_S = 0.5
BUSY_KINDS = ("forward", "backward", "optimizer")
"""The parts of a step that count as trainer work; all else is idle."""


class RunMonitor:
    """One per run. `watch` is its background task."""

    def __init__(
        self, *, name: str, steps: int, config: ObserveConfig, view: View, writers: Sequence[MetricsWriter]
    ) -> None:
        self.phase = "starting"
        self.rewards: deque[float] = deque(maxlen=200)
        self.heldout: list[tuple[int, float]] = []
        self.drops: dict[str, int] = {}
        self.trainer_busy_s = 0.0
        self.staleness_sum = 0.0
        self.staleness_max = 0.0
        self.reports: list[EngineReport] = []
        self._name = name
        self._steps = steps
        self._config = config
        self._view = view
        self._writers = writers
        self._start = asyncio.get_running_loop().time()
        self._step = 0
        self._samples = 0
        self._last_staleness = 0.0
        self._stalls: list[float] = []
        """Of the updates since the last step."""
        self._busy: dict[str, float] = {}
        self._tokens_per_s = 0.0
        self._drop_samples: dict[str, str] = {}

    def log(self, line: str) -> None:
        self._view.log(line)

    def on_step(self, step: TrainedStep, bound: int) -> None:
        """Merge every rank's metrics with what the controller knows, and write one line."""
        metrics, seconds = step.metrics(), step.seconds()
        self.trainer_busy_s += sum(seconds.get(kind, 0.0) for kind in BUSY_KINDS)
        reward = float(np.mean(np.concatenate([group.scored.values for group in step.taken.groups])))
        staleness = metrics.get("staleness_mean", 0.0)
        self.staleness_sum += staleness
        self._last_staleness = staleness
        self.staleness_max = max(self.staleness_max, metrics.get("staleness_max", 0.0))
        self.rewards.append(reward)
        self._step = step.number
        self._samples += sum(len(group.scored.scores) for group in step.taken.groups)
        row = {
            "time_s": step.time_s - self._start,
            "reward": reward,
            **metrics,
            **{f"{kind}_s": value for kind, value in seconds.items()},
            **({"sync_stall_s": max(self._stalls)} if self._stalls else {}),
            "max_staleness": float(bound),
            "waited_s": step.waited_s,
            "step_s": step.took_s,
            "samples": float(self._samples),
            "tokens_per_s": self._tokens_per_s,
        }
        self._stalls.clear()
        for writer in self._writers:
            writer.write(step.number, row)

    def on_evaluation(self, step: int, reward: float) -> None:
        self.heldout.append((step, reward))
        for writer in self._writers:
            writer.write(step, {"heldout_reward": reward})

    def on_update(self, receipt: UpdateReceipt) -> None:
        """What an update cost the slowest engine; reported with the step that ends next. Version 0 does not count,
        since nothing is generated before it."""
        if receipt.version > 0:
            self._stalls.append(receipt.stall_s)

    def on_drop(self, reason: str, message: str) -> None:
        """Every drop is counted; the first of each kind is logged."""
        self.drops[reason] = self.drops.get(reason, 0) + 1
        if self.drops[reason] == 1:
            self.log(f"dropped a group ({reason}): {message}; further ones are counted, not printed")

    async def watch(self, controller: Controller, engines: Sequence[Engine]) -> None:
        loop = asyncio.get_running_loop()
        before: list[EngineReport] | None = None
        then = loop.time()
        alarmed_at = 0.0
        while True:
            self.reports = list(await asyncio.gather(*(engine.report() for engine in engines)))
            now = loop.time()
            if before is not None and now > then:
                self._measure(before, now - then, controller)
            before, then = self.reports, now
            self._view.update(self.status(controller))
            quiet_s = now - max(controller.activity.last_progress, self._start, alarmed_at)
            if self.phase == "training" and quiet_s > self._config.watchdog_s:
                alarmed_at = now
                self.log(f"nothing has moved for {quiet_s:.0f} s: {who_waits(self.status(controller))}")
            await asyncio.sleep(POLL_S)

    def status(self, controller: Controller) -> RunStatus:
        return RunStatus(
            name=self._name,
            phase=self.phase,
            elapsed_s=asyncio.get_running_loop().time() - self._start,
            step=self._step,
            steps=self._steps,
            reward=float(np.mean(list(self.rewards)[-8:])) if self.rewards else None,
            rewards=tuple(self.rewards),
            heldout=tuple(self.heldout),
            tokens_per_s=self._tokens_per_s,
            staleness_mean=self._last_staleness,
            staleness_max=self.staleness_max,
            samples=self._samples,
            drops=dict(self.drops),
            processes=tuple(self._processes(controller)),
        )

    def _measure(self, before: list[EngineReport], elapsed_s: float, controller: Controller) -> None:
        tokens = 0.0
        for old, new in zip(before, self.reports, strict=True):
            tokens += new.counters["tokens"] - old.counters["tokens"]
            self._smooth(new.name, (new.counters["busy_s"] - old.counters["busy_s"]) / elapsed_s)
        self._smooth("trainer", float(controller.activity.trainer.startswith("step")))
        self._tokens_per_s = 0.5 * self._tokens_per_s + 0.5 * tokens / elapsed_s

    def _smooth(self, name: str, busy: float) -> None:
        self._busy[name] = 0.7 * self._busy.get(name, 0.0) + 0.3 * min(1.0, busy)

    def _processes(self, controller: Controller) -> list[ProcessStatus]:
        activity = controller.activity
        generation, training = controller.buffer.waiting_for()
        doing = activity.trainer if activity.trainer.startswith("step") else f"{activity.trainer}: {training}"
        if activity.syncing_version is not None:
            doing += f", sending version {activity.syncing_version}"
        processes = [ProcessStatus(name="trainer", busy=self._busy.get("trainer", 0.0), doing=doing)]
        for report in self.reports:
            if report.num_running + report.num_waiting:
                what = f"{report.num_running} running, {report.num_waiting} waiting"
            else:
                what = f"idle: {generation}"
                if activity.num_scoring:
                    what += f", {activity.num_scoring} being scored"
            processes.append(
                ProcessStatus(name=report.name, busy=self._busy.get(report.name, 0.0), doing=what)
            )
        return processes


def who_waits(status: RunStatus) -> str:
    return "; ".join(f"{process.name} – {process.doing}" for process in status.processes)
