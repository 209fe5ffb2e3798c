"""Finds what a new sequence need not compute: equal prefixes, and the cache of a request that it forks from.

Keys and values are found again in two ways. The *prefix index* finds whole blocks by content, for any request
under the same weights. *Finished* requests are kept by policy and id, to the token, for forks and later
turns: a fork continues its parent's cache as the parent itself would have, also across a weight update that
keeps the cache. Both are evicted when room is needed, and neither is shared between policies.

A sequence of a mixture of experts that is computed again replays its earlier experts, so it shares only
blocks that were computed with these. It finds its own and its siblings' by tokens and routes, and others
after comparing their routes.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from penstock.engines.embedded.blocks import ROOT, BlockPool, Weights
from penstock.engines.embedded.sequence import Sequence
from penstock.records.routing_records import Routes

if TYPE_CHECKING:
    from penstock.engines.embedded.route_store import BlockRoutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Holds the cache of a finished request: `tokens` are in `blocks`."""

    tokens: list[int]
    blocks: tuple[int, ...]
    kv_version: int | None
    routes: Routes | None


class PrefixCache:
    """Finds and keeps reusable blocks of `pool`. `versions` says which weights of each policy are served."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        enabled: bool,
        keep_finished: int,
        versions: Mapping[str, int],
        routes: "BlockRoutes | None" = None,
    ) -> None:
        """`routes` are those of the blocks, if they are recorded."""
        self.pool = pool
        self._routes = routes
        self.versions = dict(versions)
        self._enabled = enabled
        self._keep_finished = keep_finished
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()

    def make_room(self, num_blocks: int) -> bool:
        """Drop kept requests, oldest first, until the pool can give `num_blocks`; returns whether it can."""
        while self.pool.num_free < num_blocks and self._kept:
            self._drop(next(iter(self._kept)))
        return self.pool.num_free >= num_blocks

    def attach(self, seq: Sequence, parent: Sequence | None, fresh: Container[int] = ()) -> None:
        """Give a sequence without blocks those that it can share, and mark them computed.

        At least one token is left to compute, because its logits are needed. `parent` is the live sequence,
        of the same policy, that it forks from, if there is one. `fresh` blocks are filled by the pass that is
        being planned: they can be shared whole, but not copied, since copies come before the pass.
        """
        if seq.request.parent is not None:
            key = (seq.policy, seq.request.parent.id)
            kept = _snapshot(parent) if parent is not None else self._kept.get(key)
            if kept is not None:
                self._fork(seq, kept, seq.request.parent.keep, fresh)
        if self._routes is not None and seq.num_computed < seq.request.routing_start:
            self._routes.recall(seq)
        if not seq.blocks:
            seq.kv_version = self.versions[seq.policy]
            self._match(seq, fresh)

    def index(self, seq: Sequence, num_computed: int) -> None:
        """Enter the blocks that are full once `num_computed` tokens are computed. Sequences that hold keys of
        older weights are left out: those keys are right for that sequence only."""
        if not self._enabled or not self.is_current(seq):
            return
        size = self.pool.block_size
        while (seq.num_indexed + 1) * size <= num_computed:
            run = self._run(seq, seq.num_indexed)
            seq.node = self.pool.register(seq.blocks[seq.num_indexed], self._weights(seq), seq.node, run)
            seq.num_indexed += 1

    def keep(self, seq: Sequence) -> None:
        """Keep the blocks of a finished sequence for forks, in place of the oldest if `keep_finished` are kept."""
        if self._keep_finished == 0 or seq.num_computed == 0:
            self.release(seq)
            return
        key = (seq.policy, seq.request.id)
        if key in self._kept:
            self._drop(key)
        self._kept[key] = _snapshot(seq)
        seq.blocks = []
        self.release(seq)
        while len(self._kept) > self._keep_finished:
            self._drop(next(iter(self._kept)))

    def release(self, seq: Sequence) -> None:
        """Give a sequence's blocks back and mark none of its tokens as computed."""
        for block in reversed(seq.blocks):
            self.pool.release(block)
        seq.blocks = []
        seq.num_computed = 0
        seq.node = ROOT
        seq.num_indexed = 0
        seq.kv_version = None

    def new_version(self, policy: str, version: int, *, forget_kept: bool) -> None:
        """Serve a policy, old or new, with these weights: equal prefixes do not have equal keys across versions.
        Its kept requests are dropped only with `forget_kept`, when caches are rebuilt."""
        if policy in self.versions:
            self.pool.forget_weights((policy, self.versions[policy]))
        self.versions[policy] = version
        if forget_kept:
            self._drop_kept(policy)

    def forget_policy(self, policy: str) -> None:
        """Forget a policy that is not served any more and has no sequences left."""
        self.pool.forget_weights((policy, self.versions.pop(policy)))
        self._drop_kept(policy)

    def is_current(self, seq: Sequence) -> bool:
        """Return whether all keys and values of the sequence come from the weights that are served."""
        return seq.kv_version == self.versions[seq.policy]

    def clear_kept(self) -> None:
        for key in list(self._kept):
            self._drop(key)

    def _drop_kept(self, policy: str) -> None:
        for key in [key for key in self._kept if key[0] == policy]:
            self._drop(key)

    def _weights(self, seq: Sequence) -> Weights:
        return (seq.policy, self.versions[seq.policy])

    def _drop(self, key: tuple[str, str]) -> None:
        for block in reversed(self._kept.pop(key).blocks):
            self.pool.release(block)

    def _fork(self, seq: Sequence, kept: Kept, keep: int, fresh: Container[int]) -> None:
        size = self.pool.block_size
        usable = min(keep, len(kept.tokens), seq.num_tokens - 1)
        if usable % size and kept.blocks[usable // size] in fresh:
            usable -= usable % size
        if usable <= 0 or kept.tokens[:usable] != seq.tokens[:usable]:
            return
        # A preempted sequence has routes, and its parent may have been computed again with others.
        if seq.routes is not None:
            usable = min(usable, size * self._num_alike(seq, kept.blocks[: -(-usable // size)], fresh))
        if usable <= 0:
            return
        seq.blocks = list(kept.blocks[: -(-usable // size)])
        for block in seq.blocks:
            self.pool.share(block)
        seq.num_computed = usable
        seq.kv_version = kept.kv_version
        if seq.routes is None and kept.routes is not None:
            seq.routes = kept.routes[:usable]
        if self.is_current(seq):
            self._walk(seq, usable // size)

    def _walk(self, seq: Sequence, num_blocks: int) -> None:
        """Find the trie node of a fork's shared blocks, so that what it adds can be indexed too."""
        for number in range(num_blocks):
            found = self.pool.find(self._weights(seq), seq.node, self._run(seq, number))
            if found is None:
                return
            seq.node = found[1]
            seq.num_indexed += 1

    def _match(self, seq: Sequence, fresh: Container[int]) -> None:
        if not self._enabled:
            return
        self._share(seq, self._found(seq))
        if seq.routes is not None:
            found = list(self._found(seq, live=True))
            self._share(seq, found[: self._num_alike(seq, [block for block, _ in found], fresh)])
            self._share(seq, self._found(seq))

    def _found(self, seq: Sequence, *, live: bool = False) -> Iterator[tuple[int, int]]:
        """Yield the blocks and nodes that continue the sequence's own, found by its tokens and the routes that it
        replays. With `live` they are found by tokens alone, among blocks whose experts were not replayed. At least
        one token is left to compute."""
        number, node = seq.num_indexed, seq.node
        while (number + 1) * self.pool.block_size < seq.num_tokens:
            found = self.pool.find(self._weights(seq), node, self._run(seq, number, live=live))
            if found is None:
                return
            yield found
            number, node = number + 1, found[1]

    def _num_alike(self, seq: Sequence, blocks: Iterable[int], fresh: Container[int]) -> int:
        """Count the leading blocks that were computed with the routes that the sequence replays. Blocks that the
        planned pass fills can't be compared yet."""
        assert self._routes is not None
        there = list(takewhile(lambda block: block not in fresh, blocks))
        return self._routes.num_alike(seq, seq.num_indexed, there) if there else 0

    def _share(self, seq: Sequence, found: Iterable[tuple[int, int]]) -> None:
        for block, node in found:
            self.pool.share(block)
            seq.blocks.append(block)
            seq.node = node
            seq.num_indexed += 1
            seq.num_computed += self.pool.block_size

    def _run(self, seq: Sequence, number: int, *, live: bool = False) -> bytes:
        """Return the key by which a block is found: its tokens, and the experts replayed for them, if any."""
        size = self.pool.block_size
        part = slice(number * size, (number + 1) * size)
        run = np.asarray(seq.tokens[part], dtype=np.int32).tobytes()
        return run if live or seq.routes is None else run + seq.routes[part].tobytes()


def _snapshot(seq: Sequence) -> Kept:
    return Kept(
        tokens=seq.tokens[: seq.num_computed],
        blocks=tuple(seq.blocks),
        kv_version=seq.kv_version,
        routes=seq.routes,
    )
