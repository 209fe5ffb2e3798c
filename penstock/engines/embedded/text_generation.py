"""Loads a model, answers some prompts and streams the text, for `penstock generate`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import torch

from penstock.engines.config import EngineConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.errors import PenstockError
from penstock.models.adapter_folder import model_below
from penstock.models.adapter_merge import merge_adapter
from penstock.models.load import load_model, resolve_device, resolve_dtype
from penstock.models.text_stream import TextStream
from penstock.models.tokenizer import ChatTokenizer, warn_of_unknown_characters
from penstock.records import GenerateRequest, Message, SamplingParams, WeightUpdate
from penstock.records.interfaces import Engine, Staged, Tokenizer, Verification

Prompt = str | tuple[Message, ...]


def generate_text(
    model: str,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | None = None,
    *,
    config: EngineConfig | None = None,
    on_text: Callable[[int, str], None] = lambda number, piece: None,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Answer all `prompts` at once and return the texts. `model` is the name or folder of a model, or the folder
    of an adapter.

    `on_text(number, piece)` is called with each piece of the answer to prompt `number` as it comes, and `say`
    with a line about characters that the model does not see. Answers end at the tokenizer's end-of-sequence
    tokens, and at the stops that `sampling` adds to them.
    """
    config = config or EngineConfig()
    device = resolve_device(config.device)
    model, adapter = model_below(model)
    tokenizer = ChatTokenizer(model)
    warn_of_unknown_characters(prompts, tokenizer, say)
    loaded = load_model(model, dtype=resolve_dtype(config.dtype, device), device=device)
    if adapter is not None:
        merge_adapter(loaded, adapter)
    if config.threads:
        torch.set_num_threads(config.threads)
    sampling = sampling or SamplingParams()
    stops = dict.fromkeys((*sampling.stop_token_ids, *tokenizer.stop_token_ids))
    sampling = msgspec.structs.replace(sampling, stop_token_ids=tuple(stops))

    async def answer(engine: Engine, number: int, prompt: Prompt) -> str:
        pieces = []
        async for piece in stream_text(engine, tokenizer, prompt, sampling, request_id=f"prompt{number}"):
            on_text(number, piece)
            pieces.append(piece)
        return "".join(pieces)

    async def main() -> list[str]:
        engine = EmbeddedEngine(loaded, config=config, receiver=FixedWeights(), tokenizer=tokenizer)
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.run())
            try:
                answers = (answer(engine, number, prompt) for number, prompt in enumerate(prompts))
                texts = await asyncio.gather(*answers)
            finally:
                await engine.close()
        return texts

    return asyncio.run(main())


async def stream_text(
    engine: Engine, tokenizer: Tokenizer, prompt: Prompt, sampling: SamplingParams, *, request_id: str
) -> AsyncIterator[str]:
    """Yield the answer to one prompt, in pieces of whole characters. Together they are the decoded answer."""
    request = GenerateRequest(
        id=request_id,
        token_ids=np.array(tokenizer.encode_prompt(prompt), dtype=np.int32),
        sampling=sampling,
    )
    text = TextStream(tokenizer)
    async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            piece = text.push(chunk.token_ids.tolist(), is_last=chunk.finish_reason is not None)
            if piece:
                yield piece


class FixedWeights:
    """Refuses every update, as the receiver of an engine without a trainer."""

    def stages(self, update: WeightUpdate) -> bool:
        return False

    def stage(self, update: WeightUpdate) -> Staged:
        raise PenstockError("this engine serves fixed weights and takes no updates")

    def cancel(self) -> None:
        pass

    def is_prepared(self, staged: Staged) -> bool:
        return False

    def load(self, staged: Staged, tensors: Mapping[str, Any]) -> Verification:
        raise PenstockError("this engine serves fixed weights and takes no updates")

    def drop(self, staged: Staged) -> None:
        pass

    def close(self) -> None:
        pass
