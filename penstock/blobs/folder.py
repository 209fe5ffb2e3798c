"""Blobs as files in a folder that the processes of a run share: a folder a scope, a file a blob."""

import shutil
from pathlib import Path
from urllib.parse import quote

from penstock.blobs.verification import ref_of, split_key, verified
from penstock.errors import BlobLost
from penstock.types import BlobRef


class FolderBlobs:
    """`penstock.interfaces.BlobStore` over files. Whoever made the folder removes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, data: bytes) -> BlobRef:
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise BlobLost(f"blob {key} of {len(data)} bytes could not be written: {error}") from error
        return ref_of(key, data)

    def get(self, ref: BlobRef) -> bytes:
        try:
            data = self._path(ref.key).read_bytes()
        except OSError as error:
            raise BlobLost(f"blob {ref.key} can't be read: {error}") from error
        return verified(ref, data)

    def holds(self, ref: BlobRef) -> bool:
        try:
            return self._path(ref.key).stat().st_size == ref.num_bytes
        except OSError:
            return False

    def delete(self, scope: str) -> None:
        # A request that is being cancelled may put its blob meanwhile; what is left goes with the folder.
        shutil.rmtree(self._folder / quote(scope, safe=""), ignore_errors=True)

    def _path(self, key: str) -> Path:
        scope, name = split_key(key)
        return self._folder / quote(scope, safe="") / quote(name, safe="")
