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
    BlobCopies(tmp_path).delete(3)
    with pytest.raises(BlobLost, match="blob group-3/g3.0.0 can't be read"):
        BlobCopies(tmp_path).bring_back(second, group)
