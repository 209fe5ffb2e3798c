"""Which version an update builds on, and whose snapshot must be kept for that."""

from penstock.types import UpdateSelection


class Bases:
    """Of one publisher. An adapter builds on the weights below it, for good. A delta builds on the last version
    that every engine has acknowledged, whose snapshot is therefore kept; one in `anchor_every` builds on nothing,
    and so does the first."""

    def __init__(self, selection: UpdateSelection, first: int | None, anchor_every: int) -> None:
        """`first` is what engines have before the first update."""
        self._selection = selection
        self._base = first
        self._anchor_every = anchor_every
        self._since_anchor = 0
        self._deltas: set[int] = set()
        """Versions that were last described as deltas."""

    def of(self, version: int, *, full: bool) -> int | None:
        """The version that this one builds on; None for a full update."""
        if self._selection != "delta":
            return self._base
        self._deltas.discard(version)
        is_due = self._since_anchor + 1 >= self._anchor_every
        if full or is_due or self._base is None or self._base == version:
            return None
        self._deltas.add(version)
        return self._base

    def released(self, version: int, *, delivered: bool) -> list[int]:
        """Versions whose snapshots nobody needs any more."""
        if self._selection != "delta":
            if delivered and self._base is not None and self._selection != "adapter":
                self._base = version
            return [version]
        if version == self._base:
            return []
        if not delivered:
            self._deltas.discard(version)
            return [version]
        self._since_anchor = self._since_anchor + 1 if version in self._deltas else 0
        self._deltas.discard(version)
        before, self._base = self._base, version
        return [] if before is None else [before]
