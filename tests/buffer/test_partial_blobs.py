"""Blobs of groups that still run are copied beside the run, and come back if they are whole."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.blobs import MemoryBlobs
from penstock.buffer.partial_blobs import PartialBlobs
from penstock.errors import BlobLost
from penstock.types import BlobRef


def test_copies_come_back_until_their_group_has_ended(tmp_path: Path) -> None:
    async def main() -> None:
        store = MemoryBlobs()
        refs = [store.put("group-3/g3.0.0.mask", b"one"), store.put("group-4/g4.0.0.mask", b"two")]
        blobs = PartialBlobs(tmp_path, store, asyncio.to_thread)
        missing = BlobRef(key="group-3/gone", num_bytes=3, checksum=0)
        blobs.keep_soon([*refs, missing])
        await blobs.close()
        blobs.delete_soon(4)
        await blobs.close()
        new = MemoryBlobs()
        again = PartialBlobs(tmp_path, new, asyncio.to_thread)
        again.bring_back(refs[:1])
        assert new.get(refs[0]) == b"one"
        for lost in (refs[1], missing):
            with pytest.raises(BlobLost):
                again.bring_back([lost])

    asyncio.run(main())


def test_a_copy_that_was_cut_off_is_lost(tmp_path: Path) -> None:
    async def inline(work: Callable[[], None]) -> None:
        work()

    async def main() -> None:
        store = MemoryBlobs()
        ref = store.put("group-3/mask", b"whole")
        blobs = PartialBlobs(tmp_path, store, inline)
        blobs.keep_soon([ref])
        await blobs.close()
        (tmp_path / "group-3" / "mask").write_bytes(b"who")
        with pytest.raises(BlobLost, match="cut short"):
            blobs.bring_back([ref])

    asyncio.run(main())
