"""Decides which tokens go into the next forward pass, without touching tensors.

Every running sequence gets its next token each step. Up to `prefill_chunk` tokens go to prompts, the oldest
first, so a long prompt never stops the others from decoding. When the cache is full the youngest running
sequence is preempted: its blocks are freed, its tokens are kept, and it is computed again when there is room.
The oldest sequence always makes progress, so none can starve.

    add ─► waiting ─► running ─► finish
     │        ▲ ▲        │
     ▼        │ └ preempt ┘
    held ─────┘

Requests are held while new weights wait for the running ones to end (`sync.interrupt: drain`).
"""

import bisect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from penstock.engines.embedded.prefix_cache import PrefixCache
from penstock.engines.embedded.sequence import Sequence
from penstock.engines.embedded.waiting_line import WaitingLine

Span = tuple[Sequence, int, int]
"""A sequence, its first token to compute, and how many."""


@dataclass(slots=True)
class Batch:
    """Describes one forward pass: block copies to make first, then spans of sequences to compute."""

    spans: list[Span] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to): blocks to copy before the pass, because their owners diverge. All are read before any is
    written, so `from` is never a block that is itself copied to."""
    origins: dict[int, int] = field(default_factory=dict)
    """The source of each copy, by target."""
    fresh: set[int] = field(default_factory=set)
    """Blocks that this pass fills and that are shared from now on."""
    num_prefill: int = 0
    """Tokens of prompts, and of sequences that are computed again."""
    num_cached: int = 0
    """Tokens that sequences admitted for this pass need not compute."""
    num_preempted: int = 0

    def copy(self, source: int, target: int) -> None:
        source = self.origins.get(source, source)
        self.copies.append((source, target))
        self.origins[target] = source


class Scheduler:
    """Batches sequences continuously over `cache`, at most `max_batch` at once."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_batch: int,
        prefill_chunk: int,
        on_preempt: Callable[[Sequence], None] | None = None,
    ) -> None:
        """`on_preempt` is called with a sequence that is about to lose its blocks and will be computed again."""
        self.cache = cache
        self._on_preempt = on_preempt
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self.running: list[Sequence] = []
        self._waiting = WaitingLine()
        self._live: dict[str, Sequence] = {}
        self._prefilling: dict[tuple[str, bytes], Sequence] = {}
        self._is_full = False
        """The next waiting sequence did not fit the cache, and nothing has been freed since."""
        self._drain: tuple[Collection[str], Callable[[], None]] | None = None
        """Policies whose sequences must end before held ones begin, and the callback for when they have."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._waiting.num_held

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    def live(self) -> list[Sequence]:
        """Return every sequence that is neither finished nor cancelled."""
        return list(self._live.values())

    def find(self, request_id: str) -> Sequence | None:
        return self._live.get(request_id)

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self._live[seq.request.id] = seq
            self._waiting.arrive(seq)

    def hold(self, policies: Collection[str], on_drained: Callable[[], None]) -> None:
        """Hold back requests of these policies that have not begun, and call `on_drained` when the others have
        ended."""
        assert self._drain is None, "updates are taken one after another"
        self._drain = policies, on_drained
        self._waiting.hold(policies)
        self._tell_if_drained()

    def release_held(self) -> None:
        self._drain = None
        self._waiting.release_held()
        self._is_full = False

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence that has all its tokens. Its cache is kept for forks as long as there is room."""
        self._leave_running(seq)
        del self._live[seq.request.id]
        self.cache.keep(seq)
        self._is_full = False
        self._tell_if_drained()

    def cancel(self, seq: Sequence) -> None:
        """Remove a sequence, running or waiting. Sequences that followed it compute their prompt themselves."""
        del self._live[seq.request.id]
        if seq.is_running:
            self._leave_running(seq)
        else:
            self._waiting.remove(seq)
        self.cache.release(seq)
        self._is_full = False
        self._tell_if_drained()

    def restart(self, policy: str) -> int:
        """Discard what sequences of a policy have drawn and start them again; returns how many tokens that were.
        All drawn tokens must have been read from the device."""
        begun = [seq for seq in self._live.values() if seq.policy == policy and seq.num_output]
        num_tokens = sum(seq.num_output for seq in begun)
        for seq in begun:
            self._preempt(seq)
            seq.restart()
        return num_tokens

    def new_version(self, policy: str, version: int, *, recompute_kv: bool) -> int:
        """Serve a policy with new weights from the next pass on; returns how many tokens are computed again. Its
        running sequences keep their cache, or with `recompute_kv` give it up and compute it again. Prompts
        from which nothing was sampled are always computed again, at most once each, so that no update makes
        them wait for ever. Other policies are not affected."""
        self._prefilling = {key: seq for key, seq in self._prefilling.items() if seq.policy != policy}
        self.cache.new_version(policy, version, forget_kept=recompute_kv)
        given_up = [
            seq for seq in self.running if seq.policy == policy and (recompute_kv or _may_begin_again(seq))
        ]
        num_tokens = sum(seq.num_computed for seq in given_up)
        for seq in given_up:
            self._preempt(seq)
        self._is_full = False
        return num_tokens

    def wants_prompts(self, *, join_at: int) -> bool:
        """Return whether a prompt should be computed now. Waiting sequences join once `join_at` slots of the
        batch are free and they fit, or when nothing else is left to do."""
        if any(seq.leader is None and _missing(seq) > 1 for seq in self.running):
            return True
        free = self.max_batch - len(self.running)
        return bool(self._waiting) and not self._is_full and (free >= join_at or not self.running)

    def schedule_prompts(self, *, may_preempt: bool) -> Batch | None:
        """Plan a pass over prompts alone, without sequences that only wait for their next token. Returns None
        when a sequence would have to be preempted and may not."""
        prompts = [seq for seq in self.running if seq.leader is None and _missing(seq) > 1]
        if not may_preempt:
            budget, ends = self.prefill_chunk, []
            for seq in prompts:
                count = min(_missing(seq), budget)
                budget -= count
                ends.append(seq.num_computed + count)
            if not self._all_fit(prompts, ends):
                return None
        return self._schedule(prompts)

    def ready(self) -> list[Sequence]:
        """Return the running sequences that wait for their next token and may have one."""
        return [
            seq
            for seq in self.running
            if seq.leader is None and _missing(seq) == 1 and seq.num_tokens + seq.num_pending < seq.limit
        ]

    def reserve(
        self, sequences: list[Sequence], count: int, *, may_preempt: bool
    ) -> list[tuple[int, int]] | None:
        """Make room for `count` more tokens of each sequence, preempting the youngest if there is not enough.
        Returns the block copies to make first, or None when a sequence would have to be preempted and may
        not."""
        batch = Batch()
        counts = [min(count, seq.limit - seq.num_computed) for seq in sequences]
        if not may_preempt:
            ends = [seq.num_computed + number for seq, number in zip(sequences, counts, strict=True)]
            if not self._all_fit(sequences, ends):
                return None
        for seq, number in zip(sequences, counts, strict=True):
            if seq.is_running and (not may_preempt or self._make_fit(seq, number, batch)):
                self._grow(seq, number, batch)
        return batch.copies

    def taken(self, seq: Sequence, *, has_ended: bool = False) -> None:
        """Account for tokens that a device drew and that were added to the sequence: blocks that are full of
        known tokens become shareable. Of a sequence that has ended, tokens still in flight do not count."""
        if has_ended or not seq.num_pending:
            seq.num_computed = min(seq.num_computed, seq.num_tokens - 1)
        self.cache.index(seq, seq.num_tokens - 1)

    def schedule(self) -> Batch:
        """Plan the next pass. Blocks are allocated here; `commit` must follow the pass."""
        return self._schedule(list(self.running))

    def _schedule(self, sequences: list[Sequence]) -> Batch:
        batch = Batch()
        budget = self.prefill_chunk
        for seq in sequences:
            if seq.leader is not None or not seq.is_running:
                continue
            missing = _missing(seq)
            count = 1 if missing == 1 else min(missing, budget)
            if count == 0 or not self._make_fit(seq, count, batch):
                continue
            self._grow(seq, count, batch)
            if missing > 1:
                budget -= count
                batch.num_prefill += count
            self._plan(seq, count, batch)
        if not batch.num_preempted:
            self._admit(budget, batch)
        return batch

    def commit(self, batch: Batch) -> list[tuple[int, Sequence]]:
        """Account for a pass that is done. Returns the sequences that get a token, each with the number of the
        span whose last row of logits it is drawn from; followers draw from their leader's."""
        drawn: list[tuple[int, Sequence]] = []
        for number, (seq, start, count) in enumerate(batch.spans):
            seq.num_computed = start + count
            if seq.num_computed < seq.num_tokens:
                continue
            drawn.append((number, seq))
            if seq.num_output == 0:
                self._prefilling.pop(seq.prompt_key, None)
            for follower in seq.followers:
                self._part(seq, follower)
                drawn.append((number, follower))
            seq.followers = []
        return drawn

    def _plan(self, seq: Sequence, count: int, batch: Batch) -> None:
        batch.spans.append((seq, seq.num_computed, count))
        # All writes of a layer come before its reads, so this pass itself may already share the blocks.
        known = seq.num_indexed
        self.cache.index(seq, seq.num_computed + count)
        batch.fresh.update(seq.blocks[known : seq.num_indexed])

    def _admit(self, budget: int, batch: Batch) -> None:
        while self._waiting and len(self.running) < self.max_batch:
            seq = self._waiting.first
            leader = self._prefilling.get(seq.prompt_key) if seq.num_output == 0 else None
            if leader is not None and seq.request.parent is None:
                self._enter(seq)
                seq.leader = leader
                leader.followers.append(seq)
                batch.num_cached += seq.num_tokens
                continue
            if budget == 0:
                return
            if not self._try_start(seq, batch):
                self._is_full = True
                return
            self._enter(seq)
            count = min(seq.num_tokens - seq.num_computed, budget)
            self._grow(seq, count, batch)  # `_try_start` has made room
            budget -= count
            batch.num_prefill += count
            batch.num_cached += seq.num_computed
            if seq.num_output == 0 and self.cache.is_current(seq):
                self._prefilling.setdefault(seq.prompt_key, seq)
            self._plan(seq, count, batch)

    def _try_start(self, seq: Sequence, batch: Batch) -> bool:
        """Attach shared blocks if everything the sequence needs now fits beside them, with one block to spare
        for every running sequence, so that it isn't preempted in the next step."""
        parent = self._live.get(seq.request.parent.id) if seq.request.parent is not None else None
        if parent is not None and parent.policy != seq.policy:
            parent = None
        self.cache.attach(seq, parent, batch.fresh)
        if self._fits(seq, seq.num_tokens, spare=len(self.running)):
            return True
        self.cache.release(seq)
        return False

    def _fits(self, seq: Sequence, num_tokens: int, spare: int = 0) -> bool:
        """Return whether there is room up to `num_tokens`. It tries twice: dropping kept requests may end the
        sharing that a copy was counted for."""
        return any(self.cache.make_room(self._needed(seq, num_tokens) + spare) for _ in range(2))

    def _all_fit(self, sequences: list[Sequence], ends: list[int]) -> bool:
        """Return whether all of them can grow to these numbers of tokens without a preemption."""

        def needed() -> int:
            return sum(self._needed(seq, end) for seq, end in zip(sequences, ends, strict=True))

        return any(self.cache.make_room(needed()) for _ in range(2))

    def _needed(self, seq: Sequence, num_tokens: int) -> int:
        """Count the blocks to allocate before tokens up to `num_tokens` can be written."""
        pool = self.cache.pool
        needed = -(-num_tokens // pool.block_size) - len(seq.blocks)
        for block in seq.blocks[seq.num_computed // pool.block_size :]:
            if pool.owners(block) > 1:
                needed += 1
        return needed

    def _make_fit(self, seq: Sequence, count: int, batch: Batch) -> bool:
        """Make room for `count` more tokens, preempting the youngest if needed; returns False when that is `seq`
        itself."""
        while not self._fits(seq, seq.num_computed + count):
            victim = self.running[-1]
            self._preempt(victim)
            batch.num_preempted += 1
            if victim is seq:
                return False
        return True

    def _grow(self, seq: Sequence, count: int, batch: Batch) -> None:
        """Give the sequence blocks of its own to write `count` tokens into. There must be room for them."""
        pool = self.cache.pool
        end = seq.num_computed + count
        for number in range(seq.num_computed // pool.block_size, len(seq.blocks)):
            block = seq.blocks[number]
            if pool.owners(block) == 1:
                pool.unindex(block)
            else:
                seq.blocks[number] = pool.allocate()
                batch.copy(block, seq.blocks[number])
                pool.release(block)
        while len(seq.blocks) * pool.block_size < end:
            seq.blocks.append(pool.allocate())

    def _part(self, leader: Sequence, follower: Sequence) -> None:
        """Detach a follower from its leader: the shared prompt is computed, and the follower owns its blocks
        too."""
        follower.leader = None
        follower.blocks = list(leader.blocks)
        for block in follower.blocks:
            self.cache.pool.share(block)
        follower.num_computed = leader.num_computed
        follower.node = leader.node
        follower.num_indexed = leader.num_indexed
        follower.kv_version = leader.kv_version
        follower.routes = leader.routes

    def _tell_if_drained(self) -> None:
        if self._drain is not None:
            policies, on_drained = self._drain
            num_left = sum(seq.policy in policies for seq in self._live.values())
            if num_left == self._waiting.num_held:
                on_drained()

    def _enter(self, seq: Sequence) -> None:
        self._waiting.pop()
        bisect.insort(self.running, seq, key=lambda each: each.order)
        seq.is_running = True

    def _leave_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        seq.is_running = False
        if seq.leader is not None:
            seq.leader.followers.remove(seq)
            seq.leader = None
        if self._prefilling.get(seq.prompt_key) is seq:
            del self._prefilling[seq.prompt_key]
        for follower in seq.followers:
            follower.leader = None
            follower.is_running = False
            self.running.remove(follower)
            self._waiting.push(follower)
        seq.followers = []

    def _preempt(self, seq: Sequence) -> None:
        if not seq.is_running:
            return
        self._leave_running(seq)
        if self._on_preempt is not None:
            self._on_preempt(seq)
        self.cache.release(seq)
        seq.num_preempted += 1
        self._waiting.push(seq)


def _missing(seq: Sequence) -> int:
    """Count the tokens whose keys and values are not computed."""
    return seq.num_tokens + seq.num_pending - seq.num_computed


def _may_begin_again(seq: Sequence) -> bool:
    """Return whether computing its prompt again would cost nothing but time: nothing is sampled yet, and it was
    never preempted. A later turn keeps what its parent computed."""
    return not (seq.num_output or seq.num_pending or seq.num_preempted or seq.request.parent is not None)
