import asyncio
from typing import Any, cast

import numpy as np
import pytest

from penstock.blobs import MemoryBlobs
from penstock.engines.embedded.delivery import Stream
from penstock.engines.embedded.outbox import Outbox
from penstock.errors import BlobLost
from penstock.sampling_masks import Packed, fetch_mask
from penstock.types import BlobRef, MaskRef
from tests.engines.embedded.test_delivery import Letters
from tests.engines.embedded.test_sampler import row

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
        outbox.send_due(seq, outbox.take(seq, [1, 2, 2, 4], [-1.0] * 4, [7] * 4, KEPT))
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
    outbox.send_due(seq, outbox.take(seq, [1, 2, 2, 4], [-1.0] * 4, [7] * 4, KEPT))
    assert scheduler.finished == 1
    with pytest.raises(BlobLost, match="no space left"):
        asyncio.run(stream.next())


def test_masks_go_out_in_pieces_where_another_engine_may_have_to_go_on() -> None:
    blobs = MemoryBlobs()
    outbox = Outbox(cast(Any, NoScheduler()), None, 320, blobs)
    seq = row(record_sampling_mask=True, max_tokens=12, record_every=4)
    stream = outbox.streams[seq.request.id] = Stream()
    for _ in range(3):
        outbox.send_due(seq, outbox.take(seq, [1, 2, 2, 4], [-1.0] * 4, [7] * 4, KEPT))

    async def read() -> list[MaskRef | None]:
        return [(await stream.next()).sampling_mask for _ in range(3)]

    refs = asyncio.run(read())
    assert [(ref.start, ref.num_tokens) for ref in refs if ref is not None] == [(0, 4), (4, 4), (8, 4)]
    for ref in refs:
        assert ref is not None
        assert fetch_mask(blobs, ref).words.tolist() == KEPT.words.tolist()
