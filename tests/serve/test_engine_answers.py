"""An engine's chunks as pieces of an answer."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.records import Chunk, FinishReason, GenerateRequest, SamplingParams
from penstock.serve.engine_answers import stream_answer, whole_answer

REQUEST = GenerateRequest(id="r", token_ids=np.array([1], dtype=np.int32), sampling=SamplingParams())


class Chunks:
    def __init__(self, *chunks: tuple[list[int], bool, FinishReason | None]) -> None:
        self._chunks = chunks

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        for tokens, restarts, reason in self._chunks:
            yield Chunk(
                token_ids=np.array(tokens, dtype=np.int32),
                logprobs=np.zeros(len(tokens), dtype=np.float32),
                versions=np.array(tokens, dtype=np.int32),
                finish_reason=reason,
                restarts=restarts,
            )


def test_an_answer_that_began_again_is_the_last_one() -> None:
    whole = asyncio.run(
        whole_answer(Chunks(([1, 2], False, None), ([3], True, None), ([4], False, "stop")), REQUEST)
    )
    assert (whole.token_ids, whole.reason) == ([3, 4], "stop")


def test_a_stream_that_begins_again_fails() -> None:
    async def read() -> None:
        async for _ in stream_answer(Chunks(([1], False, None), ([3], True, "stop")), REQUEST):
            pass

    with pytest.raises(PenstockError, match="the answer restarted"):
        asyncio.run(read())
