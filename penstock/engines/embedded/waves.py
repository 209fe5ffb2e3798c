"""Requests that begin together, and alone: while a wave is in the batch, nothing else is.

A sequence's logits depend in their last bits on what else is in the batch. Waves make a batch the same whenever its
requests are, however fast they come: runs that must repeat bit by bit ask for them.
"""

from penstock.engines.embedded.sequence import Sequence


class WaveLine:
    """Holds waves until all of their requests are there and the wave before has left."""

    def __init__(self) -> None:
        self._gathering: dict[str, list[Sequence]] = {}
        self._complete: list[list[Sequence]] = []
        self._running: list[Sequence] = []

    def arrive(self, seq: Sequence) -> list[Sequence]:
        """Those that may begin now, in their order; a request without a wave at once."""
        wave = seq.request.wave
        if wave is None:
            return [seq]
        members = self._gathering.setdefault(wave.name, [])
        members.append(seq)
        if len(members) == wave.size:
            self._complete.append(self._gathering.pop(wave.name))
        return self._next()

    def left(self, seq: Sequence) -> list[Sequence]:
        """One has ended or was cancelled, perhaps before it began: those that may begin now."""
        wave = seq.request.wave
        if wave is None:
            return []
        for members in (self._running, *self._complete, self._gathering.get(wave.name, [])):
            members[:] = [member for member in members if member is not seq]
        self._complete = [members for members in self._complete if members]
        return self._next()

    def _next(self) -> list[Sequence]:
        if self._running or not self._complete:
            return []
        first = min(self._complete, key=lambda members: min(seq.order for seq in members))
        self._complete.remove(first)
        # Not in the order in which they came, which other processes may decide.
        arrivals = sorted(seq.arrival for seq in first)
        first.sort(key=lambda seq: (len(seq.request.id), seq.request.id))
        for seq, arrival in zip(first, arrivals, strict=True):
            seq.arrival = arrival
        self._running = first
        return list(first)
