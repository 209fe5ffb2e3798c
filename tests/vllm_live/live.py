"""What tests on live servers share: an engine that joins one, a publisher of real weights, and plain forward passes."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.blob_stores import MemoryBlobs
from penstock.engines.config import EngineConfig
from penstock.engines.kinds import EngineParts, ServedEngine, open_engine
from penstock.engines.vllm.config import VllmConfig
from penstock.models.config import LoraConfig
from penstock.models.published import published_tensors
from penstock.records import Chunk
from penstock.sync.shared_memory import SharedMemoryPublisher
from penstock.sync.transports import AnyReceiver
from tests.engines.contract import ask, collect, running

PROMPT = [1, 10, 2, 11]
CONTEXT = 512
"""Of the servers that tests start."""
ADAPTER_RANK = 4
LONG = 400
"""Tokens of an answer that an update should meet under way, also where others use the cores."""


def is_healthy(path: Path) -> bool:
    """Whether a server answers on this socket."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(5)
        try:
            asking.connect(str(path))
            asking.sendall(b"GET /health HTTP/1.1\r\nHost: vllm\r\nConnection: close\r\n\r\n")
            return b" 200 " in asking.recv(64)
        except OSError:
            return False


def parts_of(
    model: str, *, kind: str = "vllm", lora: LoraConfig | None = None, context: int = 64, **vllm: Any
) -> EngineParts:
    return EngineParts(
        name=f"{kind}0",
        model=model,
        device="cpu",
        config=EngineConfig(
            kind=kind,
            dtype="float32",
            max_context=context,
            vllm=VllmConfig(**vllm),
            embedded={"kv_tokens": 4096},
        ),
        receiver=AnyReceiver(),
        blobs=MemoryBlobs(),
        versions={"policy": 0},
        lora=lora,
    )


@asynccontextmanager
async def opened(parts: EngineParts) -> AsyncIterator[ServedEngine]:
    async with running(await open_engine(parts)) as engine:
        yield engine


async def reset_weights(server: str, model: str, folder: Path) -> None:
    """Give a server the weights of the model's folder again."""
    tensors = published_tensors(load(model))
    publisher = SharedMemoryPublisher(tensors, folder=folder)
    publisher.snapshot(1, tensors)
    async with opened(parts_of(model, urls=(server,))) as engine:
        await engine.update(publisher.describe(1), "abort_retry")
    publisher.close()


def load(model: str) -> nn.Module:
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return loaded


def changed(model: nn.Module, seed: int, scale: float = 0.05) -> nn.Module:
    """The model with noise on every weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in published_tensors(model).values():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor += scale * tensor.abs().mean() * noise
    return model


def forward_logprobs(model: nn.Module, prompt: list[int], tokens: list[int]) -> list[float]:
    """Of each token after all that precede it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0].float()
    table = torch.log_softmax(logits, dim=-1)
    return [float(table[len(prompt) + place - 1, token]) for place, token in enumerate(tokens)]


async def check_answer(engine: ServedEngine, model: nn.Module, version: int) -> None:
    """Its tokens are of this version, and their logprobs those of the model."""
    asked = ask(f"v{version}", prompt=PROMPT, max_tokens=30, seed=version)
    chunks = await collect(engine.generate(asked))
    assert set(column(chunks, "versions")) == {version}
    expected = forward_logprobs(model, PROMPT, column(chunks, "token_ids"))
    assert column(chunks, "logprobs") == pytest.approx(expected, abs=1e-3)


def column(chunks: list[Chunk], name: str) -> list[Any]:
    return [value.item() for chunk in chunks for value in getattr(chunk, name)]
