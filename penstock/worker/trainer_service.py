"""Serves the calls to a trainer process. Steps run in one thread, in order; a second thread hashes snapshots
beside them, and a third writes checkpoints."""

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import msgspec

from penstock.checksums import write_checksums
from penstock.errors import DiskFull, StepTooLarge
from penstock.models.tokenizer import ChatTokenizer
from penstock.observe.pulse import LONG_S
from penstock.observe.recorder import Recorder
from penstock.records import DEFAULT_POLICY, CheckpointWritten, StepPlan, StepResult, WeightUpdate
from penstock.records.interfaces import WeightPublisher
from penstock.safe_files import is_full_disk
from penstock.trainer.checkpoint.checkpoint_writer import CheckpointRequest, CheckpointWriter
from penstock.trainer.parallel.joint_folder import joint_folder
from penstock.trainer.parallel.ranks import SingleRank
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.worker.out_of_memory import TRAINER, is_out_of_memory, naming_settings

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SLOWER = 10.0
"""A step that takes this many times as long as the longest so far counts as hanging."""


class TrainerService:
    """Implements `penstock.records.interfaces.Trainer` with one rank's trainer and the publisher of its weights."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        publisher: WeightPublisher,
        tokenizer: ChatTokenizer,
        events: Recorder,
        *,
        policy: str = DEFAULT_POLICY,
        version: int = 0,
    ) -> None:
        self._longest_s = 0.0
        """The longest of the steps so far and the warm-up, which compiles."""
        self._policy = policy
        self._first_version = version
        self._trainer = trainer
        self._publisher = publisher
        self._tokenizer = tokenizer
        self._events = events
        self._stepping = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._publishing = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._checkpoints = CheckpointWriter(
            trainer, lambda folder: self._tokenizer.save(folder), events.log, trainer.checkpoint_ranks
        )
        for number, weights in enumerate(trainer.trained.starting_weights(), start=version):
            publisher.snapshot(number, weights)

        # Runs while the engines start. Later work in the same thread waits for it.
        self.warmed_up = self._stepping.submit(self._warm_up)

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self._trainer.weights().values())

    async def step(self, plan: StepPlan) -> StepResult:
        return await _in(self._stepping, self._step, plan)

    async def snapshot(self, version: int) -> None:
        await _in(self._stepping, self._snapshot, version)

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        with self._events.measure("publish", "hash", version=version):
            return await _in(self._publishing, partial(self._publisher.describe, version, full=full))

    async def send(self, version: int) -> None:
        """Send the version to the engines. When cancelled, it still ends soon, since the receivers are notified."""
        sending = asyncio.ensure_future(_in(self._publishing, self._send, version))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            self._publisher.cancel()
            await asyncio.wait([sending])
            raise

    async def release(self, version: int, *, delivered: bool = True) -> None:
        self._publisher.release(version, delivered=delivered)

    async def save(self, folder: str) -> None:
        await _in(self._stepping, self._save, Path(folder))

    async def checkpoint(self, folder: str, files: dict[str, bytes], remove: Sequence[str] = ()) -> None:
        request = CheckpointRequest(folder=folder, files=files, remove=tuple(remove))
        await _in(self._stepping, self._checkpoint, request)

    async def checkpoint_written(self) -> CheckpointWritten:
        return await asyncio.shield(asyncio.wrap_future(self._checkpoints.written()))

    def close(self) -> None:
        """Close the publisher, which removes the files that it published."""
        self._publisher.close()

    def _warm_up(self) -> None:
        with (
            naming_settings("the trainer", TRAINER),
            self._events.measure("step", "warm up"),
            self._events.pulse.phase("warm-up", LONG_S),
        ):
            begin = self._events.now()
            self._trainer.warm_up()
            self._longest_s = self._events.now() - begin

    def _snapshot(self, version: int) -> None:
        with self._events.measure("step", "snapshot", version=version):
            starting = self._trainer.trained.starting_weights()
            is_below_adapter = len(starting) > 1 and version == self._first_version
            self._publisher.snapshot(version, starting[0] if is_below_adapter else self._trainer.weights())

    def _send(self, version: int) -> None:
        with self._events.measure("publish", "send", version=version):
            self._publisher.send(version)

    def _step(self, plan: StepPlan) -> StepResult:
        if plan.policy != self._policy:
            raise ValueError(f"this trainer trains policy {self._policy!r}, got a plan of {plan.policy!r}")
        self.warmed_up.result()
        begin = self._events.now()
        limit_s = SLOWER * self._longest_s
        with naming_settings("the trainer", TRAINER), self._events.pulse.phase(f"step {plan.step}", limit_s):
            result = self._train(plan)
            start = time.perf_counter()
            if plan.publishes is not None:
                self._publisher.snapshot(plan.publishes, self._trainer.weights())
        seconds = {**result.seconds, "snapshot": time.perf_counter() - start}
        self._longest_s = max(self._longest_s, self._events.now() - begin)
        record_parts(self._events, plan.step, begin, seconds)
        return msgspec.structs.replace(result, seconds=seconds)

    def _train(self, plan: StepPlan) -> StepResult:
        """Run the step. If memory runs out and nothing has changed, raise `StepTooLarge`, to try smaller
        micro-batches."""
        try:
            return self._trainer.step(plan)
        except RuntimeError as error:
            if not is_out_of_memory(error) or not self._trainer.undo_step():
                raise
            cause = error
        # Outside the handler, whose traceback would keep the tensors of the step alive.
        with naming_settings("the trainer", TRAINER, StepTooLarge):
            raise cause.with_traceback(None)

    def _save(self, folder: Path) -> None:
        self.warmed_up.result()
        self._checkpoints.settle()  # when the run ends, this process may be ended next
        ranks = self._trainer.checkpoint_ranks or SingleRank()
        try:
            with (
                self._events.measure("step", "save"),
                self._events.pulse.phase("saving", LONG_S),
                joint_folder(folder, ranks) as unnamed,
            ):
                sums = self._trainer.save(unnamed)  # the first rank gathers all parts and writes
                if ranks.rank == 0:
                    self._tokenizer.save(unnamed)
                    write_checksums(unnamed, sums)
        except Exception as error:
            if not is_full_disk(error):
                raise
            free = shutil.disk_usage(folder.parent).free
            what = str(error)
            if not isinstance(error, DiskFull):  # raised while writing something other than the weights
                what += f"; its weights need {self._trainer.trained.saved_bytes:,} bytes"
            raise DiskFull(f"{folder} can't be written: {what}, and {free:,} bytes are free") from error

    def _checkpoint(self, request: CheckpointRequest) -> None:
        self.warmed_up.result()
        with self._events.measure("step", "checkpoint"), self._events.pulse.phase("checkpoint", LONG_S):
            self._checkpoints.begin(request)


def record_parts(events: Recorder, step: int, begin: float, seconds: Mapping[str, float]) -> None:
    """Record a step and its parts as spans. Parts that alternated over micro-batches are laid end to end, in the
    order in which they first came: their lengths are right, their positions inside the step are not."""
    end = events.now()
    events.span("step", "step", begin, end, step=step)
    for part, length in seconds.items():
        events.span("step", part, begin, min(end, begin + length), step=step)
        begin = min(end, begin + length)


async def _in(thread: ThreadPoolExecutor, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)
