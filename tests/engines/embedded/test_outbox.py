import asyncio
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from penstock.blob_stores import MemoryBlobs
from penstock.engines.embedded.outbox import UNREAD, Outbox, Stream, cut_chunk, finish_reason
from penstock.errors import BlobLost
from penstock.records import BlobRef, Chunk, FinishReason, MaskRef, Message
from penstock.records.sampling_masks import Packed, fetch_mask
from tests.engines.embedded.test_sampler import row
from tests.records.builders import make_chunk

KEPT = Packed([2, 0, 1, 3], np.array([1, 2, 5, 4, 5, 6], dtype=np.int32))
"""Of four tokens."""


@pytest.mark.parametrize(
    ("options", "reason", "count", "words"),
    [
        ({"max_tokens": 9}, None, 4, [1, 2, 5, 4, 5, 6]),
        ({"max_tokens": 3}, "length", 3, [1, 2, 5]),
        ({"max_tokens": 9, "stop": ("ab",)}, "stop", 2, [1, 2]),
        ({"max_tokens": 9, "stop_token_ids": (1,)}, "stop", 1, [1, 2]),
    ],
)
def test_all_that_is_drawn_is_taken_up_to_where_the_sequence_ends(
    options: dict[str, Any], reason: str | None, count: int, words: list[int]
) -> None:
    outbox = Outbox(cast(Any, None), Letters(), 320, MemoryBlobs())
    seq = row(record_sampling_mask=True, **options)
    assert outbox.take(seq, [1, 2, 2, 4], [-1.0, -2.0, -3.0, -4.0], [7, 7, 8, 8], KEPT) == reason
    assert seq.num_output == outbox.num_tokens == count
    assert (seq.logprobs, seq.versions) == ([-1.0, -2.0, -3.0, -4.0][:count], [7, 7, 8, 8][:count])
    (kept,) = seq.masks
    assert kept.counts == KEPT.counts[:count]
    assert kept.words.tolist() == words


class NoScheduler:
    """Only counts what ended."""

    def __init__(self) -> None:
        self.finished = 0

    def finish(self, seq: object) -> None:
        self.finished += 1


def test_the_masks_of_all_chunks_are_one_blob_when_the_request_ends() -> None:
    blobs, scheduler = MemoryBlobs(), NoScheduler()
    outbox = Outbox(cast(Any, scheduler), None, 320, blobs)
    seq = row(record_sampling_mask=True, max_tokens=8)
    stream = outbox.streams[seq.request.id] = Stream()
    for _ in range(2):
        outbox.send(seq, outbox.take(seq, [1, 2, 2, 4], [-1.0] * 4, [7] * 4, KEPT))
    assert scheduler.finished == 1

    async def read() -> list[MaskRef | None]:
        return [(await stream.next()).sampling_mask for _ in range(2)]

    first, last = asyncio.run(read())
    assert first is None
    assert last is not None
    assert (last.start, last.num_tokens, last.vocab_size) == (0, 8, 320)
    assert last.blob.key == f"requests/{seq.request.id}.mask"
    mask = fetch_mask(blobs, last)
    assert mask.counts.tolist() == KEPT.counts * 2
    assert mask.words.tolist() == KEPT.words.tolist() * 2


class FullBlobs(MemoryBlobs):
    def put(self, key: str, data: bytes) -> BlobRef:
        raise BlobLost(f"blob {key} could not be written: no space left on device")


def test_a_mask_that_cant_be_stored_costs_its_request_and_not_the_engine() -> None:
    scheduler = NoScheduler()
    outbox = Outbox(cast(Any, scheduler), None, 320, FullBlobs())
    seq = row(record_sampling_mask=True, max_tokens=4)
    stream = outbox.streams[seq.request.id] = Stream()
    outbox.send(seq, outbox.take(seq, [1, 2, 2, 4], [-1.0] * 4, [7] * 4, KEPT))
    assert scheduler.finished == 1
    with pytest.raises(BlobLost, match="no space left"):
        asyncio.run(stream.next())


def test_masks_go_out_in_pieces_where_another_engine_may_have_to_go_on() -> None:
    blobs = MemoryBlobs()
    outbox = Outbox(cast(Any, NoScheduler()), None, 320, blobs)
    seq = row(record_sampling_mask=True, max_tokens=12, record_every=4)
    stream = outbox.streams[seq.request.id] = Stream()
    for _ in range(3):
        outbox.send(seq, outbox.take(seq, [1, 2, 2, 4], [-1.0] * 4, [7] * 4, KEPT))

    async def read() -> list[MaskRef | None]:
        return [(await stream.next()).sampling_mask for _ in range(3)]

    refs = asyncio.run(read())
    assert [(ref.start, ref.num_tokens) for ref in refs if ref is not None] == [(0, 4), (4, 4), (8, 4)]
    for ref in refs:
        assert ref is not None
        assert fetch_mask(blobs, ref).words.tolist() == KEPT.words.tolist()


class Letters:
    """Token n is the n-th piece. Piece 0 is special and has no text; 5 and 6 are halves of one character."""

    pieces = ("", "a", "b", "ab", "\n\n", None, None)
    stop_token_ids = (0,)

    def encode_prompt(self, prompt: str | tuple[Message, ...]) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: list[int]) -> str:
        data = b"".join("é".encode()[t - 5 : t - 4] if t >= 5 else self.pieces[t].encode() for t in token_ids)
        return data.decode(errors="replace")


@pytest.mark.parametrize(
    ("output", "stop", "stops"),
    [
        ([1, 2], ("ab",), True),
        ([3], ("ab",), True),
        ([1, 1, 2, 1], ("ab",), False),
        ([1, 2, 1, 2], ("ab",), True),
        ([2, 2, 3], ("bab",), True),
        ([1] * 40 + [0] * 40 + [2], ("ab",), True),
        ([1, 0, 2], ("ab",), True),
        ([1, 5], ("é",), False),
        ([1, 5, 6], ("é",), True),
        ([1, 4, 4], ("x", "\n\n\n"), True),
        ([1, 2], ("abc",), False),
    ],
)
def test_a_stop_string_ends_at_the_token_that_completes_it(
    output: list[int], stop: tuple[str, ...], stops: bool
) -> None:
    assert finish_reason(row(output=output, stop=stop, max_tokens=99), Letters()) == (
        "stop" if stops else None
    )


def test_a_stop_string_completed_before_min_tokens_is_past() -> None:
    assert finish_reason(row(output=[1, 2], stop=("ab",), min_tokens=3), Letters()) is None
    assert finish_reason(row(output=[1, 2, 2], stop=("ab",), min_tokens=3), Letters()) is None
    assert finish_reason(row(output=[1, 2, 1, 2], stop=("ab",), min_tokens=3), Letters()) == "stop"


def test_stop_tokens_and_length() -> None:
    assert finish_reason(row(output=[7], stop_token_ids=(7,)), None) == "stop"
    assert finish_reason(row(output=[6], stop_token_ids=(7,)), None) is None
    assert finish_reason(row(output=[6, 6], max_tokens=2), None) == "length"
    assert finish_reason(row(output=[6, 7], max_tokens=2, stop_token_ids=(7,)), None) == "stop"


def test_chunks_carry_what_is_new() -> None:
    seq = row(output=[4, 5, 6])
    seq.logprobs, seq.versions, seq.mixed = [-1.0, -2.0, -3.0], [0, 0, 1], [False, False, True]
    seq.num_sent = 1
    chunk = cut_chunk(seq, "stop")
    assert chunk.token_ids.tolist() == [5, 6]
    assert chunk.logprobs.tolist() == [-2.0, -3.0]
    assert chunk.versions.tolist() == [0, 1]
    assert chunk.mixed is not None
    assert chunk.mixed.tolist() == [False, True]
    assert chunk.sampling_mask is None
    assert len(cut_chunk(seq, "cancelled").token_ids) == 0


def test_a_stream_gives_its_chunks_before_its_error() -> None:
    async def main() -> None:
        stream = Stream()
        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        chunk = cut_chunk(row(), None)
        stream.put(chunk)
        assert await waiting is chunk
        stream.put(chunk)
        stream.fail(OSError("gone"))
        assert await stream.next() is chunk
        with pytest.raises(OSError, match="gone"):
            await stream.next()

    asyncio.run(main())


def piece(tokens: list[int], reason: FinishReason | None = None) -> Chunk:
    logprobs, versions = [token / -10 for token in tokens], [token % 3 for token in tokens]
    return make_chunk(tokens, logprobs=logprobs, versions=versions, finish_reason=reason)


def read_all(stream: Stream, count: int) -> list[Chunk]:
    async def read() -> list[Chunk]:
        return [await stream.next() for _ in range(count)]

    return asyncio.run(read())


def test_chunks_that_nobody_reads_are_joined() -> None:
    stream = Stream()
    for token in range(2 * UNREAD + 3):
        stream.put(piece([token]))
    stream.put(piece([7], "length"))
    chunks = read_all(stream, 6)
    assert [len(chunk.token_ids) for chunk in chunks] == [UNREAD, UNREAD, 1, 1, 1, 1]
    assert [token for chunk in chunks for token in chunk.token_ids] == [*range(2 * UNREAD + 3), 7]
    assert np.array_equal(chunks[1].versions, np.arange(UNREAD, 2 * UNREAD) % 3)
    assert np.allclose(chunks[1].logprobs, -np.arange(UNREAD, 2 * UNREAD) / 10)
    assert [chunk.finish_reason for chunk in chunks] == [None] * 5 + ["length"]


def test_chunks_that_are_read_in_time_stay_as_they_are() -> None:
    stream = Stream()
    sizes = []
    for token in range(3 * UNREAD):
        stream.put(piece([token]))
        sizes += [len(chunk.token_ids) for chunk in read_all(stream, 1)]
    assert sizes == [1] * (3 * UNREAD)


def test_a_chunk_that_begins_again_is_not_joined_with_those_before_it() -> None:
    stream = Stream()
    for token in range(UNREAD - 1):
        stream.put(piece([token]))
    stream.put(msgspec.structs.replace(piece([500]), restarts=True))
    stream.put(piece([501]))
    chunks = read_all(stream, UNREAD + 1)
    assert [chunk.restarts for chunk in chunks] == [False] * (UNREAD - 1) + [True, False]
