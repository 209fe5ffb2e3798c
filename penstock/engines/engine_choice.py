"""Chooses which engine of a pool gets a request.

Requests with the same prompt go to the same engine while it works on it, and forks go to the engine of their
parent, since that is where their KV cache is. A prompt that comes again later goes back to its engine only if
no other engine has less to do, because most of its cache was computed with older weights. All other requests
go to the least loaded engine.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engines.rolling_update import Member
from penstock.records import GenerateRequest

REMEMBERED = 4096
"""Number of prompts and requests whose engine is remembered."""


@dataclass(slots=True, eq=False)
class RunningPrompt:
    """Counts the requests with one prompt that are running on one engine."""

    member: Member
    count: int = 0


class EngineChoice:
    """Chooses an engine for each request. `begin` and `end` report what each engine works on."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str | bytes, Member] = OrderedDict()
        """The engine of each prompt and each request."""
        self._at_work: dict[bytes, RunningPrompt] = {}
        """The requests that are running, by prompt."""

    def forget(self, member: Member) -> None:
        """Forget an engine that has left the pool."""
        for key in [key for key, home in self._homes.items() if home is member]:
            del self._homes[key]

    def find(self, request: GenerateRequest, taking: Sequence[Member]) -> Member:
        """Choose an engine of `taking`, those that take requests now, and remember the choice."""
        least = min(taking, key=_order)
        prompt = prompt_of(request)
        home = self._homes.get(request.parent.id) if request.parent is not None else None
        if home is None and prompt in self._at_work:
            home = self._at_work[prompt].member
        if home is None:
            home = self._homes.get(prompt, least)
            home = home if home.load <= least.load else least
        if home not in taking or home.is_draining or home.is_leaving:
            home = least
        for key in (prompt, request.id):
            self._homes[key] = home
            self._homes.move_to_end(key)
        while len(self._homes) > 2 * REMEMBERED:
            self._homes.popitem(last=False)
        return home

    def begin(self, request: GenerateRequest, member: Member) -> RunningPrompt:
        prompt = prompt_of(request)
        at_work = self._at_work.get(prompt)
        if at_work is None or at_work.member is not member:
            at_work = self._at_work[prompt] = RunningPrompt(member)
        at_work.count += 1
        member.load += 1
        return at_work

    def end(self, request: GenerateRequest, at_work: RunningPrompt) -> None:
        at_work.count -= 1
        at_work.member.load -= 1
        prompt = prompt_of(request)
        if not at_work.count and self._at_work.get(prompt) is at_work:
            del self._at_work[prompt]


def _order(member: Member) -> tuple[bool, bool, int]:
    return member.is_leaving, member.is_draining, member.load


def prompt_of(request: GenerateRequest) -> bytes:
    """Return a key that is equal for two requests that can share a prompt's KV cache."""
    return request.policy.encode() + b"\0" + request.token_ids[: request.num_prompt].tobytes()
