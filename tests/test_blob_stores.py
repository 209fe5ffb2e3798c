"""Every blob store keeps what was put, says what it has lost, and forgets by scope."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock.blob_stores import FolderBlobs, MemoryBlobs, open_blobs
from penstock.errors import BlobLost
from penstock.records.interfaces import BlobStore

Damage = Callable[[bytes], None]
"""Replaces the bytes of group-1/a behind the store's back."""


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[BlobStore, Damage]:
    if request.param == "memory":
        memory = MemoryBlobs()
        return memory, lambda data: memory.scopes["group-1"].update(a=data)
    return FolderBlobs(tmp_path / "blobs"), lambda data: _write(tmp_path / "blobs/group-1/a", data)


def _write(path: Path, data: bytes) -> None:
    assert path.is_file()
    path.write_bytes(data)


def test_what_is_put_comes_back(store):
    blobs, _ = store
    refs = {key: blobs.put(key, key.encode() * 3) for key in ("group-1/a", "group-1/b", "group-12/a", "e/x")}
    empty = blobs.put("group-1/nothing", b"")
    assert [blobs.get(ref) for ref in refs.values()] == [key.encode() * 3 for key in refs]
    assert all(blobs.holds(ref) for ref in refs.values())
    assert blobs.get(empty) == b""
    assert (empty.key, empty.num_bytes) == ("group-1/nothing", 0)


def test_names_may_hold_anything(store):
    blobs, _ = store
    keys = ["group-1/../../etc", "group-1/a b%2F/é", "-/~", "a.b/…"]
    refs = [blobs.put(key, key.encode()) for key in keys]
    assert [blobs.get(ref).decode() for ref in refs] == keys


@pytest.mark.parametrize("key", ["a", "/a", "a/", "../a", "a/..", "./a"])
def test_a_key_is_scope_and_name(store, key):
    with pytest.raises(ValueError, match="a blob's key must be scope/name, got"):
        store[0].put(key, b"1")


def test_a_blob_put_again_is_replaced(store):
    blobs, _ = store
    old = blobs.put("group-1/a", b"one")
    new = blobs.put("group-1/a", b"two")
    assert blobs.get(new) == b"two"
    with pytest.raises(BlobLost, match="blob group-1/a has other bytes"):
        blobs.get(old)


def test_a_scope_is_deleted_as_a_whole_and_alone(store):
    blobs, _ = store
    gone = [blobs.put("group-1/a", b"1"), blobs.put("group-1/b", b"2")]
    kept = blobs.put("group-12/a", b"3")
    blobs.delete("group-1")
    blobs.delete("group-1")
    blobs.delete("group-9")
    assert not any(blobs.holds(ref) for ref in gone)
    assert blobs.get(kept) == b"3"
    for ref in gone:
        with pytest.raises(BlobLost, match=f"blob {ref.key} "):
            blobs.get(ref)


def test_a_blob_cut_short_is_lost_at_a_look(store):
    blobs, damage = store
    ref = blobs.put("group-1/a", b"12345")
    damage(b"1234")
    assert not blobs.holds(ref)
    with pytest.raises(BlobLost, match="blob group-1/a must have 5 bytes, got 4"):
        blobs.get(ref)


def test_a_blob_with_other_bytes_is_lost_when_read(store):
    blobs, damage = store
    ref = blobs.put("group-1/a", b"12345")
    damage(b"12346")
    assert blobs.holds(ref)
    with pytest.raises(BlobLost, match="blob group-1/a has other bytes than were put"):
        blobs.get(ref)
    with pytest.raises(BlobLost):
        blobs.get(msgspec.structs.replace(ref, key="group-2/a"))


def test_processes_share_a_folder(tmp_path):
    ref = open_blobs(str(tmp_path)).put("group-1/a", b"12")
    assert open_blobs(str(tmp_path)).get(ref) == b"12"
    assert not open_blobs("").holds(ref)


def test_a_folder_that_cant_be_written_says_so(tmp_path):
    (tmp_path / "blobs").write_text("a file where the folder should be")
    with pytest.raises(BlobLost, match="blob group-1/a of 2 bytes could not be written: "):
        FolderBlobs(tmp_path / "blobs").put("group-1/a", b"12")
