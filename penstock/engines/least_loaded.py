"""Which engine of a pool has the fewest requests, without asking all of them for every request.

A heap with entries that may be out of date: one that is popped and no longer true is put back as it is now. Whoever
makes a member more attractive (a request has ended, an update is over) says so."""

import heapq
from collections.abc import Callable, Iterable
from itertools import count

from penstock.engines.rolling_update import Member

SPARE_ENTRIES = 64


def _order(member: Member) -> tuple[bool, bool, int]:
    return member.is_leaving, member.is_draining, member.load


class LeastLoaded:
    def __init__(self, takes_requests: Callable[[Member], bool]) -> None:
        """`takes_requests` says whether a member is one now; others are forgotten until they are noted again."""
        self._takes_requests = takes_requests
        self._heap: list[tuple[tuple[bool, bool, int], int, Member]] = []
        self._numbers = count()
        self._num_members = 0

    def renew(self, members: Iterable[Member]) -> None:
        """Members have come or gone, or changed in many ways at once."""
        self._heap = [(_order(member), next(self._numbers), member) for member in members]
        heapq.heapify(self._heap)
        self._num_members = len(self._heap)

    def note(self, member: Member) -> None:
        """It has fewer requests than before."""
        heapq.heappush(self._heap, (_order(member), next(self._numbers), member))
        if len(self._heap) > 4 * self._num_members + SPARE_ENTRIES:
            self.renew({id(entry[2]): entry[2] for entry in self._heap}.values())

    def find(self) -> Member | None:
        """The least loaded; among equals the one that has waited longest."""
        while self._heap:
            order, _, member = self._heap[0]
            if not self._takes_requests(member):
                heapq.heappop(self._heap)
            elif order != _order(member):
                heapq.heapreplace(self._heap, (_order(member), next(self._numbers), member))
            else:
                return member
        return None
