"""Blobs in the memory of one process: for tests, and for an engine or a trainer that is used by itself."""

from penstock.blobs.verification import ref_of, split_key, verified
from penstock.errors import BlobLost
from penstock.types import BlobRef


class MemoryBlobs:
    """`penstock.interfaces.BlobStore` as a dict."""

    def __init__(self) -> None:
        self.scopes: dict[str, dict[str, bytes]] = {}

    def put(self, key: str, data: bytes) -> BlobRef:
        scope, name = split_key(key)
        self.scopes.setdefault(scope, {})[name] = data
        return ref_of(key, data)

    def get(self, ref: BlobRef) -> bytes:
        data = self._find(ref)
        if data is None:
            raise BlobLost(f"blob {ref.key} is not in this process's memory: it was deleted or never put")
        return verified(ref, data)

    def holds(self, ref: BlobRef) -> bool:
        data = self._find(ref)
        return data is not None and len(data) == ref.num_bytes

    def delete(self, scope: str) -> None:
        self.scopes.pop(scope, None)

    def _find(self, ref: BlobRef) -> bytes | None:
        scope, name = split_key(ref.key)
        return self.scopes.get(scope, {}).get(name)
