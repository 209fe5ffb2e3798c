"""Tiny random models, and engines around them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock.engines.config import EngineConfig
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.records import Chunk, GenerateRequest, WeightUpdate, joined_chunk
from penstock.records.interfaces import Staged, Verification
from penstock.records.sampling_masks import fetch_mask
from tests.engines.contract import running
from tests.records.builders import kept_rows

VOCAB = 61
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 8, "sliding_window": 7}

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, _GROUPED),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _GROUPED),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**_GROUPED, "head_dim": 8}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            **_GEMMA,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**_GEMMA, "query_pre_attn_scalar": 8}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {**_GEMMA, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
    ),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {**_SHAPE, "rotary_pct": 0.5}),
}


def make_model(family: str = "llama", seed: int = 0) -> nn.Module:
    """A random model with transformers' own attention; the same seed gives the same weights."""
    model_class, config_class, options = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(**options, attn_implementation="eager")
    model: nn.Module = model_class(config).eval()
    return model


class NoWeights:
    """A receiver that stages nothing and changes nothing."""

    def stages(self, update: WeightUpdate) -> bool:
        return False

    def stage(self, update: WeightUpdate) -> Staged:
        return Staged(update)

    def cancel(self) -> None:
        pass

    def is_prepared(self, staged: Staged) -> bool:
        return False

    def load(self, staged: Staged, tensors: Mapping[str, Any]) -> Verification:
        return lambda: 0.0

    def drop(self, staged: Staged) -> None:
        pass

    def close(self) -> None:
        pass


@asynccontextmanager
async def serve(model: nn.Module | None = None, **options: Any) -> AsyncIterator[EmbeddedEngine]:
    """An engine that runs while the block does."""
    async with running(make_engine(model if model is not None else make_model(), **options)) as engine:
        yield engine


class SeededWeights(NoWeights):
    """A receiver whose version n is `make_model(family, seed=n)`."""

    def __init__(self, family: str, *, prepared: bool = False) -> None:
        self.family = family
        self.models: dict[int, nn.Module] = {}
        self._prepared = prepared

    def model(self, version: int) -> nn.Module:
        if version not in self.models:
            self.models[version] = make_model(self.family, seed=version)
        return self.models[version]

    def is_prepared(self, staged: Staged) -> bool:
        return self._prepared

    def load(self, staged: Staged, tensors: Mapping[str, Any]) -> Verification:
        with torch.no_grad():
            for name, value in self.model(staged.update.version).named_parameters():
                tensors[name].copy_(value)
        return lambda: 0.0


class Driver:
    """Steps an engine by hand, so that a test decides what happens between two forward passes."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.requests: dict[str, GenerateRequest] = {}
        self.chunks: dict[str, list[Chunk]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, request: GenerateRequest) -> None:
        self.requests[request.id] = request
        self.chunks[request.id] = []
        self._tasks[request.id] = asyncio.create_task(self._consume(request))
        await asyncio.sleep(0)

    async def cancel(self, request_id: str) -> None:
        task = self._tasks.pop(request_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def step(self) -> None:
        if self.engine._scheduler.has_work:
            self.engine._stepper.step(self.engine.versions)
        await asyncio.sleep(0)

    async def drain(self) -> None:
        while self.engine._scheduler.has_work:
            await self.step()
        await asyncio.gather(*self._tasks.values())

    def running(self) -> list[str]:
        return [name for name, task in self._tasks.items() if not task.done()]

    def finished(self) -> list[str]:
        return [name for name, chunks in self.chunks.items() if chunks and chunks[-1].finish_reason]

    def output(self, request_id: str) -> list[int]:
        return [int(token) for chunk in self.chunks[request_id] for token in chunk.token_ids]

    def logprobs(self, request_id: str) -> torch.Tensor:
        return torch.cat([torch.from_numpy(chunk.logprobs) for chunk in self.chunks[request_id]])

    def versions(self, request_id: str) -> list[int]:
        return [int(version) for chunk in self.chunks[request_id] for version in chunk.versions]

    def mixed(self, request_id: str) -> list[bool]:
        mixed = joined_chunk(self.chunks[request_id]).mixed
        return [] if mixed is None else [bool(each) for each in mixed]

    def masks(self, request_id: str) -> list[list[int]]:
        """The kept ids of every token."""
        (ref,) = [chunk.sampling_mask for chunk in self.chunks[request_id] if chunk.sampling_mask is not None]
        return kept_rows(fetch_mask(self.engine.blobs, ref))

    def check_nothing_is_held(self) -> None:
        """Every block of the cache comes back once no prefix is kept."""
        self.engine._stepper.drain()
        self.engine.forget_cache()
        assert self.engine._scheduler.cache.pool.num_free == self.engine._runner.num_blocks

    async def _consume(self, request: GenerateRequest) -> None:
        async for chunk in self.engine.generate(request):
            self.chunks[request.id].append(chunk)


def open_device_on_cpu(runner: Any, config: EmbeddedConfig, versions: Mapping[str, int]) -> Any:
    """What `ModelRunner.open_device` does on a GPU; kernels run under Triton's interpreter."""
    from penstock.engines.embedded.cuda.device import Device
    from penstock.engines.embedded.joined_projections import join_projections
    from penstock.engines.embedded.model_preparation import compile_layers

    join_projections(runner.model)
    if config.compile == "on":
        compile_layers(runner.model, len(runner.shapes))
    return Device(
        runner.model,
        runner.cache,
        vocab=runner.vocab_size,
        max_batch=config.max_batch,
        max_context=runner.max_context,
        block_size=runner.block_size,
        window=config.window,
        versions=versions,
        max_adapters=config.max_adapters,
        routes=runner.open_device_routes(),
    )


def make_engine(model: nn.Module, **options: Any) -> EmbeddedEngine:
    """An engine around `model`; options of `EngineConfig`, `EmbeddedConfig` and the engine may be mixed."""
    own = {key: options.pop(key) for key in ("receiver", "tokenizer", "versions", "blobs") if key in options}
    own.setdefault("receiver", NoWeights())
    inner = {key: options.pop(key) for key in list(options) if key in EmbeddedConfig.model_fields}
    section = EmbeddedConfig(**{"kv_tokens": 1024, "block_size": 4, **inner})
    return EmbeddedEngine(model, config=EngineConfig(**options, embedded=section), **own)
