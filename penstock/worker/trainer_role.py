"""A trainer process: steps run in one thread, in order; snapshots are hashed in another beside them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from penstock.algorithms.config import AlgorithmConfig
from penstock.blobs import open_blobs
from penstock.channel import Channel
from penstock.config.unresolved import refuse_auto
from penstock.errors import UserError
from penstock.interfaces import WeightPublisher
from penstock.models.config import LoraConfig
from penstock.models.load import DTYPES, load_config, load_model, resolve_device
from penstock.models.published import wire_dtypes
from penstock.models.tokenizer import ChatTokenizer, max_positions
from penstock.observe.recorder import Recorder
from penstock.safe_files import remove_folder, whole_folder
from penstock.sync.adapter_publisher import AdapterPublisher
from penstock.sync.config import SyncConfig
from penstock.sync.configured_publisher import open_publisher
from penstock.sync.transports import Rendezvous
from penstock.trainer.adapter import TrainedAdapter
from penstock.trainer.config import TrainerConfig
from penstock.trainer.forward.packed_attention_check import check_packed_attention
from penstock.trainer.plan_transfer import serve_steps
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.state_files import load_state, save_state
from penstock.trainer.trainer_client import (
    CHECKPOINT,
    MODEL,
    PUBLISH,
    RELEASE,
    SAVE,
    SEND,
    SNAPSHOT,
    TRAINER_STATE,
    CheckpointRequest,
    PublishRequest,
    ReleaseRequest,
    SaveRequest,
    TrainerReady,
    TrainerStart,
)
from penstock.types import DEFAULT_POLICY, StepPlan, StepResult, WeightUpdate
from penstock.worker.out_of_memory import TRAINER, naming_settings
from penstock.worker.quiet import quieten


class TrainerService:
    """What the channel serves of a trainer and its publisher."""

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
        self._policy = policy
        self._trainer = trainer
        self._publisher = publisher
        self._tokenizer = tokenizer
        self._events = events
        self._stepping = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._publishing = ThreadPoolExecutor(1, thread_name_prefix="publish")
        for number, weights in enumerate(trainer.starting_weights(), start=version):
            publisher.snapshot(number, weights)

        # Beside the start of engines. What follows in the same thread waits for it.
        self.warmed_up = self._stepping.submit(self._warm_up)

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self._trainer.weights().values())

    async def step(self, plan: StepPlan) -> StepResult:
        return await asyncio.get_running_loop().run_in_executor(self._stepping, self._step, plan)

    async def snapshot(self, version: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._stepping, self._snapshot, version)

    async def publish(self, request: PublishRequest) -> WeightUpdate:
        return await asyncio.get_running_loop().run_in_executor(self._publishing, self._describe, request)

    async def send(self, version: int) -> None:
        """Cancelled, it ends soon all the same: the engines that it was sent to are told."""
        sending = asyncio.get_running_loop().run_in_executor(self._publishing, self._send, version)
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            self._publisher.cancel()
            await asyncio.wait([sending])
            raise

    async def release(self, request: ReleaseRequest) -> None:
        self._publisher.release(request.version, delivered=request.delivered)

    async def save(self, request: SaveRequest) -> None:
        await asyncio.get_running_loop().run_in_executor(self._stepping, self._save, Path(request.folder))

    async def checkpoint(self, request: CheckpointRequest) -> None:
        await asyncio.get_running_loop().run_in_executor(self._stepping, self._checkpoint, request)

    def close(self) -> None:
        """Take back what was published: files in a folder that others see go."""
        self._publisher.close()

    def _warm_up(self) -> None:
        with naming_settings("the trainer", TRAINER), self._events.measure("step", "warm up"):
            self._trainer.warm_up()

    def _snapshot(self, version: int) -> None:
        with self._events.measure("step", "snapshot", version=version):
            self._publisher.snapshot(version, self._trainer.weights())

    def _describe(self, request: PublishRequest) -> WeightUpdate:
        with self._events.measure("publish", "hash", version=request.version):
            return self._publisher.describe(request.version, full=request.full)

    def _send(self, version: int) -> None:
        with self._events.measure("publish", "send", version=version):
            self._publisher.send(version)

    def _step(self, plan: StepPlan) -> StepResult:
        if plan.policy != self._policy:
            raise ValueError(f"this trainer trains policy {self._policy!r}, got a plan of {plan.policy!r}")
        self.warmed_up.result()
        begin = self._events.now()
        with naming_settings("the trainer", TRAINER):
            result = self._trainer.step(plan)
            start = time.perf_counter()
            if plan.publishes is not None:
                self._publisher.snapshot(plan.publishes, self._trainer.weights())
        seconds = {**result.seconds, "snapshot": time.perf_counter() - start}
        tell_parts(self._events, plan.step, begin, seconds)
        return msgspec.structs.replace(result, seconds=seconds)

    def _save(self, folder: Path) -> None:
        self.warmed_up.result()
        with self._events.measure("step", "save"), whole_folder(folder) as unnamed:
            self._trainer.save(unnamed)
            self._tokenizer.save(unnamed)

    def _checkpoint(self, request: CheckpointRequest) -> None:
        self.warmed_up.result()
        with self._events.measure("step", "checkpoint"), whole_folder(Path(request.folder)) as unnamed:
            for name in (TRAINER_STATE, MODEL):
                (unnamed / name).mkdir()
            save_state(unnamed / TRAINER_STATE, self._trainer.state_dict())
            self._trainer.save(unnamed / MODEL)
            self._tokenizer.save(unnamed / MODEL)
            for name, data in request.files.items():
                (unnamed / name).write_bytes(data)
        for old in request.remove:
            remove_folder(Path(old))


def tell_parts(events: Recorder, step: int, begin: float, seconds: Mapping[str, float]) -> None:
    """A step and its parts, as spans. Parts that took turns over micro-batches are laid end to end, in the order in
    which they first came: their lengths are right, their places inside the step are not."""
    end = events.now()
    events.span("step", "step", begin, end, step=step)
    for part, length in seconds.items():
        events.span("step", part, begin, min(end, begin + length), step=step)
        begin = min(end, begin + length)


async def start(
    channel: Channel, request: TrainerStart, fail: Callable[[BaseException], None], events: Recorder
) -> TrainerReady:
    quieten()
    torch.set_num_threads(request.threads)
    torch.manual_seed(request.seed)
    with naming_settings("the trainer", TRAINER):
        service = await asyncio.to_thread(_build, request, events)
    serve_steps(channel, service.step)
    channel.serve(SNAPSHOT, service.snapshot)
    channel.serve(PUBLISH, service.publish)
    channel.serve(SEND, service.send)
    channel.serve(RELEASE, service.release)
    channel.serve(SAVE, service.save)
    channel.serve(CHECKPOINT, service.checkpoint)
    channel.on_close(service.close)

    def warmed_up(task: "asyncio.Future[None]") -> None:
        error = None if task.cancelled() else task.exception()
        # What the user can mend is the answer to the first step; the process stays to deliver that.
        if error is not None and not isinstance(error, UserError):
            fail(error)

    asyncio.wrap_future(service.warmed_up).add_done_callback(warmed_up)
    return TrainerReady(num_parameters=service.num_parameters)


def _build(request: TrainerStart, events: Recorder) -> TrainerService:
    torch.set_num_threads(request.threads)
    device = resolve_device(request.device)
    config = TrainerConfig.model_validate(request.trainer)
    refuse_auto(
        {
            "trainer.dtype": config.dtype,
            "trainer.compile": config.compile,
            "engine.dtype": request.wire_dtype,
            "sync.transport": SyncConfig.model_validate(request.sync).transport,
        }
    )
    algorithm = AlgorithmConfig.model_validate(request.algorithm)
    # Masters are made from float32 weights. Weights that stay need none, and are only ever read as they compute.
    dtype = "float32" if request.lora is None else config.dtype
    model = load_model(request.model, dtype=dtype, device=device, trust_remote_code=request.trust_remote_code)
    check_packed_attention(model.config, request.max_context or max_positions(model.config))
    adapter = _add_adapter(request, model)
    reference = None
    if algorithm.needs_reference and adapter is None:
        reference = load_model(
            request.model, dtype="float32", device=device, trust_remote_code=request.trust_remote_code
        )
    trainer = PolicyTrainer(
        model,
        config=config,
        algorithm=algorithm,
        total_steps=request.total_steps,
        reference=reference,
        adapter=adapter,
        device=device,
        blobs=open_blobs(request.blobs),
        saved_dtype=load_config(request.model, trust_remote_code=request.trust_remote_code).dtype,
    )
    if request.checkpoint:
        trainer.load_state_dict(load_state(Path(request.checkpoint) / TRAINER_STATE))
    publisher = _open_publisher(request, model, trainer.starting_weights(), adapter)
    tokenizer = ChatTokenizer(
        request.model, pad_token=request.pad_token, trust_remote_code=request.trust_remote_code
    )
    return TrainerService(
        trainer, publisher, tokenizer, events, policy=request.policy, version=request.version
    )


def _add_adapter(request: TrainerStart, model: nn.Module) -> TrainedAdapter | None:
    """None where all weights are trained. A checkpoint brings its own, so the one that the run began with need not
    be there any more."""
    if request.lora is None:
        return None
    folder = Path(request.adapter) if request.adapter and not request.checkpoint else None
    return TrainedAdapter(model, LoraConfig.model_validate(request.lora), base=request.model, folder=folder)


def _open_publisher(
    request: TrainerStart,
    model: nn.Module,
    starting: Sequence[Mapping[str, torch.Tensor]],
    adapter: TrainedAdapter | None,
) -> WeightPublisher:
    """`starting` is all that is published, or the weights below an adapter and then the adapter."""
    section = SyncConfig.model_validate(request.sync)
    at = Rendezvous(
        Path(section.folder or request.folder), interface=section.interface, token=request.sync_token
    )

    def publisher(tensors: Mapping[str, torch.Tensor], **options: Any) -> WeightPublisher:
        options["dtypes"] = wire_dtypes(model, DTYPES[request.wire_dtype], tensors)
        options["policy"] = request.policy
        return open_publisher(section, tensors, at, **options)

    if adapter is None:
        return publisher(starting[0])
    below, own = starting
    return AdapterPublisher(
        publisher(below, slots=1, selection="full"),
        publisher(own, selection="adapter", base=request.version, adapter=adapter.spec),
        base_version=request.version,
    )
