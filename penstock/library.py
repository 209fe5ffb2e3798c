"""Opens an engine or a trainer alone, without a run folder, a controller or other processes.

    engine.answer ─► Turn ─► ScoredGroup.of ─► trainer.step ─► trainer.published ─► engine.update

`open_engine` serves a model in the caller's process and event loop. `open_trainer` makes optimizer steps on groups
of answers, in a thread. A run's workers are built from the same two. `penstock.loop.rollout_buffer.RolloutBuffer`
decides when a group may start and which groups a step takes, and needs neither.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch

from penstock.algorithms.config import AlgorithmConfig
from penstock.api import cache_folder
from penstock.blob_stores import MemoryBlobs
from penstock.demo.model import open_builtin
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.opening import without_auto
from penstock.engines.kinds import EngineParts, ServedEngine
from penstock.engines.kinds import open_engine as open_kind
from penstock.errors import UserError
from penstock.http_server.hub_access import check_hub
from penstock.loop.history import VersionHistory
from penstock.models.adapter_check import CheckedAdapter, check_adapter
from penstock.models.compilation import is_worth_compiling
from penstock.models.config import ModelConfig
from penstock.models.load import resolve_device, resolve_dtype
from penstock.models.outline import outline_of
from penstock.models.tokenizer import ChatTokenizer
from penstock.observe.event_queue import EventQueue
from penstock.placement.placed_config import engine_with_adapter
from penstock.records import (
    DEFAULT_POLICY,
    GenerateRequest,
    Interrupt,
    Message,
    SamplingParams,
    ScoredGroup,
    Turn,
    UpdateReceipt,
    WeightUpdate,
    joined_chunk,
    since_restart,
)
from penstock.rollout.episode_spec import check_replayed
from penstock.sync.config import SyncConfig
from penstock.sync.transports import AnyReceiver, Rendezvous, choose_transport
from penstock.trainer.config import TrainerConfig
from penstock.trainer.step.packing import plan_step
from penstock.trainer.trainer_start import TrainerStart
from penstock.worker.quiet import quieten
from penstock.worker.trainer_role import build_service
from penstock.worker.trainer_service import TrainerService

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""Text, chat messages (`{"role": …, "content": …}`) or token ids."""


@asynccontextmanager
async def open_engine(
    model: str = "builtin", *, lora: Mapping[str, Any] | None = None, **engine: Any
) -> AsyncIterator["OpenEngine"]:
    """Serve a model in this process: a Hugging Face name or folder, or `builtin`.

    Keywords are settings of the `engine` section, such as `max_context=512` or `embedded={"kv_tokens":
    8192}`. `lora` is the `model.lora` section of the trainer whose adapter this engine will serve.
    """
    quieten()
    config = EngineConfig.model_validate(engine)
    device = resolve_device(config.device)
    folder = await asyncio.to_thread(open_builtin, model, cache_folder(), log=print)
    await asyncio.to_thread(check_hub, folder, print)
    if config.threads:
        torch.set_num_threads(config.threads)
    config = config.model_copy(update={"device": device, "dtype": resolve_dtype(config.dtype, device)})
    adapter = None if lora is None else await asyncio.to_thread(_adapter, folder, lora)
    if adapter is not None:
        config = engine_with_adapter(config, adapter)
    parts = EngineParts(
        name="engine0",
        model=folder,
        device=device,
        config=await asyncio.to_thread(without_auto, folder, config),
        receiver=AnyReceiver(Rendezvous(device=device)),
        blobs=MemoryBlobs(),
        versions={DEFAULT_POLICY: 0},
        lora=None if adapter is None else adapter.lora,
    )
    served = await open_kind(parts)
    running = asyncio.create_task(served.run())
    try:
        yield OpenEngine(served, ChatTokenizer(folder))
    finally:
        await served.close()
        await running


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """Answers prompts, and takes new weights while it does."""

    engine: ServedEngine
    """What a run sees of it: `generate` streams tokens, `report` says what it serves."""
    tokenizer: ChatTokenizer
    """The model's tokenizer: text to token ids, and back."""
    _numbers: Any = field(default_factory=itertools.count)

    async def answer(self, prompt: Prompt, **sampling: Any) -> Turn:
        """Generate one answer: its text, token ids, logprobs, and the version of the weights that sampled each
        token.

        Keywords are fields of `SamplingParams`. Answers that are awaited together share a batch.
        """
        settings = SamplingParams(**sampling)
        stops = dict.fromkeys((*settings.stop_token_ids, *self.tokenizer.stop_token_ids))
        request = GenerateRequest(
            id=f"answer{next(self._numbers)}",
            token_ids=np.array(self._token_ids(prompt), dtype=np.int32),
            sampling=msgspec.structs.replace(settings, stop_token_ids=tuple(stops)),
        )
        chunks = []
        async with aclosing(self.engine.generate(request)) as coming:  # type: ignore[type-var]
            async for chunk in coming:
                chunks.append(chunk)
        whole = joined_chunk(since_restart(chunks))
        reason = chunks[-1].finish_reason
        assert reason is not None
        return Turn(
            id=request.id,
            prompt_ids=request.token_ids,
            output_ids=whole.token_ids,
            logprobs=whole.logprobs,
            versions=whole.versions,
            mixed=whole.mixed,
            finish_reason=reason,
            sampling=request.sampling,
            text=self.tokenizer.decode(whole.token_ids.tolist()),
        )

    async def update(self, update: WeightUpdate, *, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        """Load a published version between two forward passes, verified tensor by tensor. `interrupt` says what
        happens to answers in progress."""
        return await self.engine.update(update, interrupt)

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode_prompt(prompt)
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self.tokenizer.encode_prompt(msgspec.convert(prompt, tuple[Message, ...]))
        return prompt  # type: ignore[return-value]


@asynccontextmanager
async def open_trainer(
    model: str = "builtin",
    *,
    steps: int = 1000,
    algorithm: Mapping[str, Any] | None = None,
    lora: Mapping[str, Any] | None = None,
    sync: Mapping[str, Any] | None = None,
    device: str = "auto",
    engine_dtype: str = "auto",
    seed: int = 0,
    **trainer: Any,
) -> AsyncIterator["OpenTrainer"]:
    """Train a model in a thread of this process.

    Keywords are settings of the `trainer` section, such as `learning_rate=1e-4`; `algorithm`, `lora` and
    `sync` are sections as in a config. The learning rate schedule ends after `steps`. `engine_dtype` is the
    number format of the engines that take the weights.
    """
    quieten()
    settings = TrainerConfig.model_validate(trainer)
    objective = AlgorithmConfig.model_validate(dict(algorithm or {}))
    if settings.parallel.num_ranks > 1:
        raise UserError("open_trainer is one rank in this process; penstock.train starts several")
    section = SyncConfig.model_validate(dict(sync or {}))
    device = resolve_device(device)
    folder = await asyncio.to_thread(open_builtin, model, cache_folder(), log=print)
    await asyncio.to_thread(check_hub, folder, print)
    resolved = settings.model_copy(
        update={
            "dtype": resolve_dtype(settings.dtype, device),
            "compile": await asyncio.to_thread(_compiled, settings.compile, folder, device),
        }
    )
    adapter = None if lora is None else await asyncio.to_thread(_adapter, folder, lora)
    here, _ = choose_transport(share_a_gpu=False, are_apart=False)
    with TemporaryDirectory(prefix="penstock-", dir=MEMORY) as buckets:
        start = TrainerStart(
            model=folder,
            device=device,
            threads=settings.threads or torch.get_num_threads(),
            total_steps=steps,
            seed=seed,
            folder=buckets,
            sync=section.model_dump(mode="json")
            | {"transport": here if section.transport == "auto" else section.transport},
            wire_dtype=resolve_dtype(engine_dtype, device),
            lora=None if adapter is None else adapter.lora.model_dump(mode="json"),
            trainer=resolved.model_dump(mode="json"),
            algorithm=objective.model_dump(mode="json"),
        )
        torch.manual_seed(seed)
        service = await asyncio.to_thread(build_service, start, EventQueue().of("trainer"))
        try:
            yield OpenTrainer(service, resolved, has_adapter=lora is not None)
        finally:
            service.close()


class OpenTrainer:
    """Makes optimizer steps, each with a new version of the weights. Version 0 is the model as loaded; with an
    adapter, version 1 is the adapter before the first step."""

    def __init__(self, service: TrainerService, config: TrainerConfig, *, has_adapter: bool) -> None:
        self._service, self._config = service, config
        self.history = VersionHistory()
        """The step of each version, from which ages are counted."""
        self.num_steps = 0
        for _ in range(2 if has_adapter else 1):  # the weights below an adapter, then the adapter
            self.history.issue(0)

    async def step(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Make one optimizer step on these groups and return its metrics."""
        for group in groups:
            for episode in group.group.episodes:
                for turn in episode.turns:
                    _check_trainable(turn.sampling)
        version = self.history.issue(self.num_steps + 1)
        try:
            (plan,) = plan_step(
                self.num_steps + 1,
                groups,
                micro_batch_tokens=self._config.micro_batch_tokens,
                shared_prompts=self._config.shared_prompts,
                publishes=version,
                age_of=[lambda version: self.num_steps - self.history.step_of(version)] * len(groups),
                fresh=self.history.versions_of(self.num_steps),
            )
            result = await self._service.step(plan)
        except BaseException as error:
            self.history.withdraw(version)
            if isinstance(error, Exception):
                with contextlib.suppress(ValueError):  # it has one if the step failed after that
                    await self._service.snapshot(version)  # publishing it sends unchanged weights
            raise
        self.num_steps += 1
        return result.values()

    @asynccontextmanager
    async def published(self) -> AsyncIterator[WeightUpdate]:
        """Publish the newest weights for engines in this process or another one, which must take them while the
        block runs.

        An update is a msgspec record: `msgspec.json.encode(update)` sends it anywhere. `self.history.newest`
        is its version.
        """
        version = self.history.newest
        update = await self._service.publish(version)
        delivered = False
        try:
            yield update
            delivered = True
        finally:
            await self._service.release(version, delivered=delivered)

    async def save(self, folder: str | Path) -> None:
        """Write the model in Hugging Face's format with its tokenizer, or the adapter in peft's."""
        await self._service.save(str(folder))


def _check_trainable(sampling: SamplingParams) -> None:
    check_replayed(sampling)
    if sampling.truncates:
        raise UserError(
            "answers that open_trainer trains on must be drawn with top_k=0, top_p=1 and min_p=0, got "
            f"{sampling.top_k}, {sampling.top_p:g} and {sampling.min_p:g}; penstock.train records what truncation "
            "leaves, and trains on it"
        )


def _adapter(model: str, lora: Mapping[str, Any]) -> CheckedAdapter:
    return check_adapter(ModelConfig.model_validate({"name": model, "lora": dict(lora)}), model)


def _compiled(setting: str, model: str, device: str) -> str:
    if setting != "auto":
        return setting
    count = outline_of(model, trust_remote_code=False).num_parameters if device != "cpu" else 0
    return "on" if is_worth_compiling(device, count) else "off"
