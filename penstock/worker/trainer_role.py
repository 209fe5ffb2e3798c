"""A trainer process: steps run in one thread, in order; beside them, snapshots are hashed in a second one and
checkpoints are written in a third."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from penstock.algorithms.config import AlgorithmConfig
from penstock.blobs import open_blobs
from penstock.channel import Channel
from penstock.checksums import write_checksums
from penstock.config.unresolved import refuse_auto
from penstock.errors import DiskFull, StepTooLarge, UserError
from penstock.interfaces import WeightPublisher
from penstock.models.config import LoraConfig
from penstock.models.load import DTYPES, check_device, load_config, load_model, resolve_device
from penstock.models.published import wire_dtypes
from penstock.models.tokenizer import ChatTokenizer, max_positions
from penstock.observe.pulse import LONG_S
from penstock.observe.recorder import Recorder
from penstock.safe_files import is_full_disk
from penstock.sync.bucket_layout import Slice
from penstock.sync.config import SyncConfig
from penstock.sync.private_group import bind_nccl
from penstock.sync.publishers import AdapterPublisher, open_publisher
from penstock.sync.transports import Rendezvous
from penstock.trainer.adapter import TrainedAdapter
from penstock.trainer.checkpoint.checkpoint_writer import CheckpointWriter
from penstock.trainer.config import TrainerConfig
from penstock.trainer.forward.packed_model import check_packed_attention
from penstock.trainer.parallel.joint_folder import joint_folder
from penstock.trainer.parallel.process_ranks import sample_of
from penstock.trainer.parallel.rank_layout import RankLayout
from penstock.trainer.parallel.ranks import SingleRank
from penstock.trainer.plan_transfer import serve_steps
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.step.objective import idle_corrections
from penstock.trainer.trainer_client import (
    CHECKPOINT,
    CHECKPOINT_WRITTEN,
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
from penstock.types import DEFAULT_POLICY, CheckpointWritten, StepPlan, StepResult, WeightUpdate
from penstock.usercode import extend_search_path
from penstock.worker.out_of_memory import TRAINER, is_out_of_memory, naming_settings
from penstock.worker.quiet import quieten

if TYPE_CHECKING:
    from penstock.trainer.parallel.process_ranks import ProcessRanks

SLOWER = 10.0
"""A step that takes so many times as long as the longest so far hangs."""


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
        self._longest_s = 0.0
        """Of the steps so far, and of the warm-up, which compiles."""
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

    async def checkpoint_written(self, _: None) -> CheckpointWritten:
        return await asyncio.shield(asyncio.wrap_future(self._checkpoints.written()))

    def close(self) -> None:
        """Take back what was published: files in a folder that others see go."""
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
        limit_s = SLOWER * self._longest_s
        with naming_settings("the trainer", TRAINER), self._events.pulse.phase(f"step {plan.step}", limit_s):
            result = self._train(plan)
            start = time.perf_counter()
            if plan.publishes is not None:
                self._publisher.snapshot(plan.publishes, self._trainer.weights())
        seconds = {**result.seconds, "snapshot": time.perf_counter() - start}
        self._longest_s = max(self._longest_s, self._events.now() - begin)
        tell_parts(self._events, plan.step, begin, seconds)
        return msgspec.structs.replace(result, seconds=seconds)

    def _train(self, plan: StepPlan) -> StepResult:
        """Where there is no room for the plan and nothing has changed, smaller micro-batches may be tried."""
        try:
            return self._trainer.step(plan)
        except RuntimeError as error:
            if not is_out_of_memory(error) or not self._trainer.undo_step():
                raise
            cause = error
        # Outside of the handler, whose traceback would hold the tensors of the step.
        with naming_settings("the trainer", TRAINER, StepTooLarge):
            raise cause.with_traceback(None)

    def _save(self, folder: Path) -> None:
        self.warmed_up.result()
        self._checkpoints.settle()  # a run that ends may end this process next
        ranks = self._trainer.checkpoint_ranks or SingleRank()
        try:
            with (
                self._events.measure("step", "save"),
                self._events.pulse.phase("saving", LONG_S),
                joint_folder(folder, ranks) as unnamed,
            ):
                sums = self._trainer.save(unnamed)  # the others give their parts to the first, which writes
                if ranks.rank == 0:
                    self._tokenizer.save(unnamed)
                    write_checksums(unnamed, sums)
        except Exception as error:
            if not is_full_disk(error):
                raise
            free = shutil.disk_usage(folder.parent).free
            what = str(error)
            if not isinstance(error, DiskFull):  # no room for what comes before the weights, or beside them
                what += f"; its weights need {self._trainer.trained.saved_bytes:,} bytes"
            raise DiskFull(f"{folder} can't be written: {what}, and {free:,} bytes are free") from error

    def _checkpoint(self, request: CheckpointRequest) -> None:
        self.warmed_up.result()
        with self._events.measure("step", "checkpoint"), self._events.pulse.phase("checkpoint", LONG_S):
            self._checkpoints.begin(request)


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
    torch.use_deterministic_algorithms(request.deterministic)
    with naming_settings("the trainer", TRAINER):
        service = await asyncio.to_thread(build_service, request, events)
    serve_steps(channel, service.step)
    channel.serve(SNAPSHOT, service.snapshot)
    channel.serve(PUBLISH, service.publish)
    channel.serve(SEND, service.send)
    channel.serve(RELEASE, service.release)
    channel.serve(SAVE, service.save)
    channel.serve(CHECKPOINT, service.checkpoint)
    channel.serve(CHECKPOINT_WRITTEN, service.checkpoint_written)
    channel.on_close(service.close)

    def warmed_up(task: "asyncio.Future[None]") -> None:
        error = None if task.cancelled() else task.exception()
        # What the user can mend is the answer to the first step; the process stays to deliver that.
        if error is not None and not isinstance(error, UserError):
            fail(error)

    asyncio.wrap_future(service.warmed_up).add_done_callback(warmed_up)
    return TrainerReady(num_parameters=service.num_parameters)


def build_service(request: TrainerStart, events: Recorder) -> TrainerService:
    """A rank of the trainer, with its weights published in this process."""
    torch.set_num_threads(request.threads)
    config = TrainerConfig.model_validate(request.trainer)
    device = resolve_device(request.device)
    check_device(device)
    device = _own_device(device, request.rank, config)
    refuse_auto(
        {
            "trainer.dtype": config.dtype,
            "trainer.compile": config.compile,
            "engine.dtype": request.wire_dtype,
            "sync.transport": SyncConfig.model_validate(request.sync).transport,
        }
    )
    bind_broadcasts(SyncConfig.model_validate(request.sync), device, os.environ)
    extend_search_path(request.search_path)
    algorithm = AlgorithmConfig.model_validate(request.algorithm)
    algorithm.load()
    if request.rank == 0:
        for line in idle_corrections(algorithm):
            events.log(line)
    # Masters are made from float32 weights. Weights that stay need none, and are only ever read as they compute.
    dtype = "float32" if request.lora is None else config.dtype
    # A model that is split is whole on the host, and only its parts are on the devices.
    is_split = RankLayout(parallel=config.parallel, rank=request.rank).is_sharded
    loaded_on = "cpu" if is_split else device
    model = load_model(
        request.model, dtype=dtype, device=loaded_on, trust_remote_code=request.trust_remote_code
    )
    max_context = request.max_context or max_positions(model.config)
    check_packed_attention(model.config, max_context, say=events.log)
    adapter = _add_adapter(request, model)
    reference = None
    if algorithm.needs_reference and adapter is None:
        reference = load_model(
            request.model, dtype="float32", device=loaded_on, trust_remote_code=request.trust_remote_code
        )
    parallel = _join(request, config, device, model)
    trainer = PolicyTrainer(
        model,
        config=config,
        algorithm=algorithm,
        total_steps=request.total_steps,
        reference=reference,
        adapter=adapter,
        device=device,
        blobs=open_blobs(request.blobs),
        parallel=parallel,
        saved_dtype=load_config(request.model, trust_remote_code=request.trust_remote_code).dtype,
    )
    if request.replays_routing:
        trainer.expect_routes()
    if request.checkpoint:
        trainer.load_state(Path(request.checkpoint) / TRAINER_STATE)
    publisher = _open_publisher(request, model, trainer, adapter)
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


def _own_device(device: str, rank: int, config: TrainerConfig) -> str:
    """One GPU for each rank, of those that this process sees; a device that is named with its number stays."""
    if device != "cuda" or config.parallel.num_ranks == 1:
        return device
    return f"cuda:{rank % torch.cuda.device_count()}"


def _join(
    request: TrainerStart, config: TrainerConfig, device: str, model: nn.Module
) -> "ProcessRanks | None":
    """The other ranks; None where there are none. On several machines folders of one name may hold several
    models."""
    if config.parallel.num_ranks == 1:
        return None
    from penstock.trainer.parallel.process_ranks import check_alike, join_ranks

    layout = RankLayout(parallel=config.parallel, rank=request.rank)
    ranks = join_ranks(layout, request.rendezvous, device)
    sections = json.dumps([request.trainer, request.algorithm, request.lora], sort_keys=True, default=str)
    check_alike(ranks.world, sections.encode(), "settings")
    check_alike(ranks.world, sample_of(model), "model")
    return ranks


def bind_broadcasts(section: SyncConfig, device: str, environ: MutableMapping[str, str]) -> None:
    """Before ranks make a group among themselves: NCCL keeps to the interface that it was first told."""
    if section.transport == "collective" and device.startswith("cuda"):
        bind_nccl(section.interface, environ)


def _open_publisher(
    request: TrainerStart, model: nn.Module, trainer: PolicyTrainer, adapter: TrainedAdapter | None
) -> WeightPublisher:
    """Of all weights, or of those below an adapter and then of the adapter."""
    starting = trainer.trained.starting_weights()
    slices = {
        name: Slice(shard.shape, shard.start)
        for name, shard in trainer.trained.shards().items()
        if tuple(shard.values.shape) != shard.shape
    }
    section = SyncConfig.model_validate(request.sync)
    at = Rendezvous(
        Path(section.folder or request.folder), interface=section.interface, token=request.sync_token
    )

    def publisher(tensors: Mapping[str, torch.Tensor], **options: Any) -> WeightPublisher:
        options["dtypes"] = wire_dtypes(model, DTYPES[request.wire_dtype], tensors)
        options["policy"] = request.policy
        options["slices"] = {name: slices[name] for name in tensors if name in slices}
        return open_publisher(section, tensors, at, **options)

    if adapter is None:
        return publisher(starting[0])
    below, own = starting
    return AdapterPublisher(
        lambda: publisher(below, slots=1, selection="full"),
        publisher(own, selection="adapter", base=request.version, adapter=adapter.spec),
        base_version=request.version,
    )
