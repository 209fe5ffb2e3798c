"""Requests before the batch, in the order in which they join it.

A request may be held: it stands aside until new weights are there (`sync.interrupt: drain`), while those that have
begun go on and end. Before the line, requests of a wave wait for each other.
"""

import heapq
from collections.abc import Collection

from penstock.engines.embedded.sequence import Sequence


class WaveLine:
    """Holds waves until all of their requests are there and the wave before has left: while a wave is in the batch,
    nothing else is.

    A sequence's logits depend in their last bits on what else is in the batch. Waves make a batch the same whenever
    its requests are, however fast they come: runs that must repeat bit by bit ask for them."""

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


class WaitingLine:
    """Smaller priorities first, then earlier arrivals. Its length is without those that are held."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._held: list[Sequence] = []
        self._held_policies: Collection[str] = ()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def first(self) -> Sequence:
        return self._heap[0][1]

    def arrive(self, seq: Sequence) -> None:
        """A new request."""
        if seq.policy in self._held_policies:
            self._held.append(seq)
        else:
            self.push(seq)

    def push(self, seq: Sequence) -> None:
        """One that has begun, and has to begin again."""
        heapq.heappush(self._heap, (seq.order, seq))

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[1]

    def remove(self, seq: Sequence) -> None:
        self._heap = [entry for entry in self._heap if entry[1] is not seq]
        heapq.heapify(self._heap)
        self._held = [held for held in self._held if held is not seq]

    def hold(self, policies: Collection[str]) -> None:
        """Requests of these policies that have no token yet stand aside, and so do those that come."""
        self._held_policies = policies
        waiting = [seq for _, seq in self._heap]
        self._held = [seq for seq in waiting if seq.policy in policies and not seq.num_output]
        self._heap = [(seq.order, seq) for seq in waiting if seq not in self._held]
        heapq.heapify(self._heap)

    def let_go(self) -> None:
        """Those that stood aside join the line, each at its place."""
        for seq in self._held:
            self.push(seq)
        self._held, self._held_policies = [], ()
