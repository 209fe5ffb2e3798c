"""The trainer's side of a run that trains an adapter: the weights below it once, then the adapter alone.

version b      full       the base weights; when every engine has them, their buckets are freed
version b+1 …  adapter    small, complete in itself, and on top of b
"""

from collections.abc import Mapping
from typing import Any

from penstock.interfaces import WeightPublisher
from penstock.types import WeightUpdate


class AdapterPublisher:
    """Two publishers as one, told apart by the version. Both may be of any transport."""

    def __init__(self, base: WeightPublisher, adapter: WeightPublisher, *, base_version: int) -> None:
        self._base, self._adapter = base, adapter
        self._base_version = base_version

    def snapshot(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Of the base weights under their version, of the adapter under every other."""
        self._of(version).snapshot(version, tensors)

    def describe(self, version: int, *, full: bool = False) -> WeightUpdate:
        return self._of(version).describe(version, full=full)

    def send(self, version: int) -> None:
        self._of(version).send(version)

    def cancel(self) -> None:
        self._base.cancel()
        self._adapter.cancel()

    def release(self, version: int, *, delivered: bool = True) -> None:
        self._of(version).release(version, delivered=delivered)
        if version == self._base_version:
            self._base.close()

    def close(self) -> None:
        self._base.close()
        self._adapter.close()

    def _of(self, version: int) -> WeightPublisher:
        return self._base if version == self._base_version else self._adapter
