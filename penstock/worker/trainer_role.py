"""Turns a worker into a trainer process: builds its model, its reference and the publisher of its weights."""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.algorithms.config import AlgorithmConfig
from penstock.blob_stores import open_blobs
from penstock.channel import Channel
from penstock.config.unresolved import refuse_auto
from penstock.errors import UserError
from penstock.models.config import LoraConfig
from penstock.models.load import DTYPES, check_device, load_model, resolve_device
from penstock.models.published import wire_dtypes
from penstock.models.support import load_config
from penstock.models.tokenizer import ChatTokenizer, max_positions
from penstock.observe.recorder import Recorder
from penstock.records.interfaces import WeightPublisher
from penstock.sync.bucket_layout import Slice
from penstock.sync.config import SyncConfig
from penstock.sync.private_group import bind_nccl
from penstock.sync.publishers import AdapterPublisher, open_publisher
from penstock.sync.transports import Rendezvous, transport_of
from penstock.trainer.adapter import TrainedAdapter
from penstock.trainer.config import TrainerConfig
from penstock.trainer.forward.packed_model import check_packed_attention
from penstock.trainer.parallel.process_ranks import sample_of
from penstock.trainer.parallel.rank_layout import RankLayout
from penstock.trainer.plan_transfer import serve_trainer
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.step.objective import idle_corrections
from penstock.trainer.trainer_start import (
    TRAINER_STATE,
    TrainerReady,
    TrainerStart,
)
from penstock.usercode import extend_search_path
from penstock.worker.out_of_memory import TRAINER, naming_settings
from penstock.worker.quiet import quieten
from penstock.worker.trainer_service import TrainerService

if TYPE_CHECKING:
    from penstock.trainer.parallel.process_ranks import ProcessRanks


async def start(
    channel: Channel, request: TrainerStart, fail: Callable[[BaseException], None], events: Recorder
) -> TrainerReady:
    quieten()
    torch.set_num_threads(request.threads)
    torch.manual_seed(request.seed)
    torch.use_deterministic_algorithms(request.deterministic)
    with naming_settings("the trainer", TRAINER):
        service = await asyncio.to_thread(build_service, request, events)
    serve_trainer(service, channel)
    channel.on_close(service.close)

    def warmed_up(task: "asyncio.Future[None]") -> None:
        error = None if task.cancelled() else task.exception()
        # A `UserError` is raised by the first step; the process stays to deliver it.
        if error is not None and not isinstance(error, UserError):
            fail(error)

    asyncio.wrap_future(service.warmed_up).add_done_callback(warmed_up)
    return TrainerReady(num_parameters=service.num_parameters)


def build_service(request: TrainerStart, events: Recorder) -> TrainerService:
    """Build one rank of the trainer, and the publisher of its weights."""
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
    # Master weights are made from float32 weights. Frozen weights need none, and load in the compute dtype.
    dtype = "float32" if request.lora is None else config.dtype
    # A model that is sharded is whole on the host, and only its shards are on the devices.
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
    """Add the adapter that is trained; return None where all weights are trained. A checkpoint brings its own
    adapter, so the starting adapter's folder need not exist any more."""
    if request.lora is None:
        return None
    folder = Path(request.adapter) if request.adapter and not request.checkpoint else None
    return TrainedAdapter(model, LoraConfig.model_validate(request.lora), base=request.model, folder=folder)


def _own_device(device: str, rank: int, config: TrainerConfig) -> str:
    """Assign one of the visible GPUs to each rank. A device that is configured with its number stays."""
    if device != "cuda" or config.parallel.num_ranks == 1:
        return device
    return f"cuda:{rank % torch.cuda.device_count()}"


def _join(
    request: TrainerStart, config: TrainerConfig, device: str, model: nn.Module
) -> "ProcessRanks | None":
    """Join the other ranks; return None if there are none. It checks that all have the same settings and model,
    since folders of the same name may differ between machines."""
    if config.parallel.num_ranks == 1:
        return None
    from penstock.trainer.parallel.process_ranks import check_same, join_ranks

    layout = RankLayout(parallel=config.parallel, rank=request.rank)
    ranks = join_ranks(layout, request.rendezvous, device)
    sections = json.dumps([request.trainer, request.algorithm, request.lora], sort_keys=True, default=str)
    check_same(ranks.world, sections.encode(), "settings")
    check_same(ranks.world, sample_of(model), "model")
    return ranks


def bind_broadcasts(section: SyncConfig, device: str, environ: MutableMapping[str, str]) -> None:
    """Set NCCL's network interface if the transport uses NCCL. Call this before ranks form a group: NCCL keeps
    its first interface."""
    if transport_of(section.transport).uses_nccl and device.startswith("cuda"):
        bind_nccl(section.interface, environ)


def _open_publisher(
    request: TrainerStart, model: nn.Module, trainer: PolicyTrainer, adapter: TrainedAdapter | None
) -> WeightPublisher:
    """Open a publisher of all weights, or of the weights below an adapter and then of the adapter."""
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
