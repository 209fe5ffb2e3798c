"""Copies outlive the store that they were made from."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.blob_stores import MemoryBlobs
from penstock.durability.blob_copies import BlobCopies
from penstock.errors import BlobLost
from penstock.records import BlobRef, Group
from tests.records.builders import scored, with_blob


def group_with_blob(store: MemoryBlobs) -> Group:
    ref = store.put("group-3/g3.0.0", b"mask")
    return with_blob(scored(3, [0, 0]), ref).group


def test_blobs_are_brought_back_into_another_store(tmp_path: Path) -> None:
    first, second = MemoryBlobs(), MemoryBlobs()
    group = group_with_blob(first)
    BlobCopies(tmp_path, first).keep(group)
    copies = BlobCopies(tmp_path, second)
    copies.bring_back(group)
    assert second.scopes == {"group-3": {"g3.0.0": b"mask"}}

    async def delete() -> None:
        copies.delete_soon([3, 4])
        await copies.close()

    asyncio.run(delete())
    with pytest.raises(BlobLost, match="the blobs of group 3 can't be read: .*No such file"):
        copies.bring_back(group)


def test_one_that_was_cut_short_or_changed_is_lost(tmp_path: Path) -> None:
    store = MemoryBlobs()
    group = group_with_blob(store)
    BlobCopies(tmp_path, store).keep(group)
    copy = tmp_path / "blobs" / "group-3.blobs"
    assert copy.stat().st_mode & 0o777 == 0o600
    for data, why in ((b"mas", "it was cut short"), (b"musk", "its checksum differs")):
        copy.write_bytes(data)
        with pytest.raises(BlobLost, match=why):
            BlobCopies(tmp_path, MemoryBlobs()).bring_back(group)


def test_one_that_is_not_in_the_store_is_lost_and_leaves_no_half_copy(tmp_path: Path) -> None:
    group = group_with_blob(MemoryBlobs())
    with pytest.raises(BlobLost, match="was deleted or never put"):
        BlobCopies(tmp_path, MemoryBlobs()).keep(group)
    assert list((tmp_path / "blobs").iterdir()) == []


def test_copies_of_a_group_under_way_come_back_until_it_has_ended(tmp_path: Path) -> None:
    async def main() -> None:
        store = MemoryBlobs()
        refs = [store.put("group-3/g3.0.0.mask", b"one"), store.put("group-4/g4.0.0.mask", b"two")]
        missing = BlobRef(key="group-3/gone", num_bytes=3, checksum=0)
        copies = BlobCopies(tmp_path, store)
        copies.keep_soon(3, [refs[0], missing])
        copies.keep_soon(4, refs[1:])
        await copies.close()
        copies.group_ended(4)
        await copies.close()
        new = MemoryBlobs()
        again = BlobCopies(tmp_path, new)
        again.bring_back_partial(3, refs[:1])
        assert new.get(refs[0]) == b"one"
        for lost in (refs[1], missing):
            with pytest.raises(BlobLost):
                again.bring_back_partial(3, [lost])

    asyncio.run(main())


def test_a_copy_that_was_cut_off_is_lost(tmp_path: Path) -> None:
    async def inline(work: Callable[[], None]) -> None:
        work()

    async def main() -> None:
        store = MemoryBlobs()
        ref = store.put("group-3/mask", b"whole")
        copies = BlobCopies(tmp_path, store, inline)
        copies.keep_soon(3, [ref])
        await copies.close()
        (tmp_path / "partial-blobs" / "group-3" / "mask").write_bytes(b"who")
        with pytest.raises(BlobLost, match="cut short"):
            copies.bring_back_partial(3, [ref])

    asyncio.run(main())
