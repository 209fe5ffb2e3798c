"""Simulates the controller's workers in virtual time, with durations, versions and counts but no model.

    run_in_virtual_time(controller.run())

They keep the promises of the real ones (a token's version is that of the weights served when it was sampled;
an update takes effect at one moment), so what holds for the controller here holds there.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np

from penstock.checksums import write_checksums
from penstock.records import (
    CheckpointWritten,
    Chunk,
    EngineReport,
    Episode,
    GenerateRequest,
    Group,
    Interrupt,
    Message,
    Score,
    StepPlan,
    StepResult,
    Task,
    UpdateReceipt,
    WeightUpdate,
)
from penstock.safe_files import remove_folder, replace_link, whole_folder
from penstock.scoring.thread_scorer import MemoryScorer, refuse_if_group_is_needed
from penstock.trainer.trainer_start import LATEST

Duration = Callable[[], float]


class SimulatedEngine:
    """Samples `num_tokens()` tokens per request, `token_s()` apart, under the version that it serves at the
    time."""

    def __init__(self, *, num_tokens: Callable[[], int], token_s: Duration, update_s: Duration) -> None:
        self._num_tokens = num_tokens
        self._token_s = token_s
        self._update_s = update_s
        self.version = self._staged = -1
        self.tokens = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        first = request.num_resumed
        count = max(self._num_tokens(), first + 1)
        for index in range(first, count):
            await asyncio.sleep(self._token_s())
            self.tokens += 1
            yield Chunk(
                token_ids=np.array([1 + index], np.int32),
                logprobs=np.array([-0.5], np.float32),
                versions=np.array([self.version], np.int32),
                finish_reason="stop" if index == count - 1 else None,
            )

    async def stage(self, update: WeightUpdate) -> None:
        await asyncio.sleep(self._update_s())
        self._staged = update.version

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        if self._staged != update.version:
            await self.stage(update)
        self.version = update.version
        return UpdateReceipt(policy=update.policy, version=update.version, stall_s=0.0, verify_s=0.0)

    async def report(self) -> EngineReport:
        return EngineReport(
            name="simulated",
            versions={"policy": self.version},
            capabilities=(),
            num_running=0,
            num_waiting=0,
            max_context=1 << 20,
            counters={"tokens": float(self.tokens), "busy_s": 0.0},
        )

    async def close(self) -> None:
        pass


class SimulatedTrainer:
    """Takes `step_s()` a step and keeps every plan that it gets."""

    def __init__(self, *, step_s: Duration, publish_s: Duration) -> None:
        self._step_s = step_s
        self._publish_s = publish_s
        self.plans: list[StepPlan] = []
        self.busy_s = 0.0

    async def step(self, plan: StepPlan) -> StepResult:
        took = self._step_s()
        await asyncio.sleep(took)
        self.busy_s += took
        self.plans.append(plan)
        return StepResult(step=plan.step, metrics={}, seconds={"forward": took})

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        await asyncio.sleep(self._publish_s())
        return WeightUpdate(version=version, transport="none", tensors=(), buckets=(), fingerprint={})

    async def snapshot(self, version: int) -> None:
        pass

    async def send(self, version: int) -> None:
        pass

    async def release(self, version: int, *, delivered: bool = True) -> None:
        pass

    async def save(self, folder: str) -> None:
        pass

    async def checkpoint(self, folder: str, files: dict[str, bytes], remove: Sequence[str] = ()) -> None:
        """Write only the files, since there is no model."""
        with whole_folder(Path(folder)) as unnamed:
            for name, data in files.items():
                (unnamed / name).write_bytes(data)
            write_checksums(unnamed)
        replace_link(Path(folder).with_name(LATEST), Path(folder).name)
        for old in remove:
            remove_folder(Path(old))

    async def checkpoint_written(self) -> CheckpointWritten:
        return CheckpointWritten(seconds=0.0, num_bytes=0)


class SimulatedScorer:
    """Takes `score_s()` a call and gives `value(task, episode)`."""

    def __init__(
        self, *, score_s: Duration, value: Callable[[Task, Episode], float], needs_group: bool = False
    ) -> None:
        self._score_s = score_s
        self._scorer = MemoryScorer(value)
        self.needs_group = needs_group

    async def score(self, group: Group) -> tuple[Score, ...]:
        await asyncio.sleep(self._score_s())
        return await self._scorer.score(group)

    async def score_episode(self, task: Task, episode: Episode) -> Score:
        refuse_if_group_is_needed(self.needs_group)
        await asyncio.sleep(self._score_s())
        return await self._scorer.score_episode(task, episode)

    async def close(self) -> None:
        await self._scorer.close()


class SimulatedTokenizer:
    """Encodes every prompt as three tokens."""

    stop_token_ids: tuple[int, ...] = (0,)

    def encode_prompt(self, prompt: str | tuple[Message, ...]) -> list[int]:
        return [5, 6, 7]

    def encode(self, text: str) -> list[int]:
        return [8] * len(text)

    def encode_reply(self, messages: tuple[Message, ...], *, after: int | None) -> list[int]:
        return [9] * len(messages)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        hidden = self.stop_token_ids if skip_special_tokens else ()
        return " ".join(str(token) for token in token_ids if token not in hidden)
