"""Copies outlive the store that they were made from."""

from pathlib import Path

import msgspec
import pytest

from penstock.blobs import MemoryBlobs
from penstock.buffer.blob_copies import BlobCopies
from penstock.errors import BlobLost
from penstock.types import Group, MaskRef
from tests.buffer.test_admission import scored


def group_with_blob(store: MemoryBlobs) -> Group:
    ref = store.put("group-3/g3.0.0", b"mask")
    group = scored(3, [0, 0]).group
    episode = group.episodes[0]
    mask = MaskRef(start=0, num_tokens=2, vocab_size=9, blob=ref)
    turn = msgspec.structs.replace(episode.turns[0], sampling_masks=(mask,))
    return msgspec.structs.replace(group, episodes=(msgspec.structs.replace(episode, turns=(turn,)),))


def test_blobs_are_brought_back_into_another_store(tmp_path: Path) -> None:
    first, second = MemoryBlobs(), MemoryBlobs()
    group = group_with_blob(first)
    BlobCopies(tmp_path).keep(first, group)
    BlobCopies(tmp_path).bring_back(second, group)
    assert second.scopes == {"group-3": {"g3.0.0": b"mask"}}
    BlobCopies(tmp_path).delete([3])
    with pytest.raises(BlobLost, match="the blobs of group 3 can't be read: .*No such file"):
        BlobCopies(tmp_path).bring_back(second, group)


def test_one_that_was_cut_short_or_changed_is_lost(tmp_path: Path) -> None:
    store = MemoryBlobs()
    group = group_with_blob(store)
    BlobCopies(tmp_path).keep(store, group)
    copy = tmp_path / "group-3.blobs"
    assert copy.stat().st_mode & 0o777 == 0o600
    for data, why in ((b"mas", "it was cut short"), (b"musk", "its checksum differs")):
        copy.write_bytes(data)
        with pytest.raises(BlobLost, match=why):
            BlobCopies(tmp_path).bring_back(MemoryBlobs(), group)


def test_one_that_is_not_in_the_store_is_lost_and_leaves_no_half_copy(tmp_path: Path) -> None:
    group = group_with_blob(MemoryBlobs())
    with pytest.raises(BlobLost, match="was deleted or never put"):
        BlobCopies(tmp_path / "blobs").keep(MemoryBlobs(), group)
    assert list((tmp_path / "blobs").iterdir()) == []
