"""Queues requests in the order in which they join the batch.

A held request waits apart until new weights are loaded (`sync.interrupt: drain`), while those that have begun
continue to their end.
"""

import heapq
from collections.abc import Collection

from penstock.engines.embedded.sequence import Sequence


class WaitingLine:
    """Orders requests by the smaller priority, then the earlier arrival. Its length does not count held
    requests."""

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
        """Add a new request, or hold it while its policy is held."""
        if seq.policy in self._held_policies:
            self._held.append(seq)
        else:
            self.push(seq)

    def push(self, seq: Sequence) -> None:
        """Add a request that is not held, such as one that has to begin again."""
        heapq.heappush(self._heap, (seq.order, seq))

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[1]

    def remove(self, seq: Sequence) -> None:
        self._heap = [entry for entry in self._heap if entry[1] is not seq]
        heapq.heapify(self._heap)
        self._held = [held for held in self._held if held is not seq]

    def hold(self, policies: Collection[str]) -> None:
        """Set aside the requests of these policies that have no output token yet, and those that arrive later."""
        self._held_policies = policies
        waiting = [seq for _, seq in self._heap]
        self._held = [seq for seq in waiting if seq.policy in policies and not seq.num_output]
        self._heap = [(seq.order, seq) for seq in waiting if seq not in self._held]
        heapq.heapify(self._heap)

    def release_held(self) -> None:
        """Put the held requests into the line, each in its order."""
        for seq in self._held:
            self.push(seq)
        self._held, self._held_policies = [], ()
