"""What a new sequence need not compute: equal prefixes, and the cache of a request that it forks from.

Two ways to find keys and values again. The *prefix index* finds whole blocks by content, for any request
under the same weights. *Finished* requests are kept by policy and id, to the token, for forks and later turns: a
fork continues its parent's cache as the parent itself would have, also across a weight update that keeps
the cache. Both give way when room is needed, and neither ever crosses from one policy to another.
"""

from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np

from penstock.engines.embedded.blocks import ROOT, BlockPool, Weights
from penstock.engines.embedded.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The cache of a finished request: `tokens` are in `blocks`."""

    tokens: list[int]
    blocks: tuple[int, ...]
    kv_version: int | None


class PrefixCache:
    """Finds and keeps reusable blocks of `pool`. `versions` names the weights of each policy that are served."""

    def __init__(
        self, pool: BlockPool, *, enabled: bool, keep_finished: int, versions: Mapping[str, int]
    ) -> None:
        self.pool = pool
        self.versions = dict(versions)
        self._enabled = enabled
        self._keep_finished = keep_finished
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()

    def make_room(self, num_blocks: int) -> bool:
        """Drop kept requests, oldest first, until the pool can give `num_blocks`."""
        while self.pool.num_free < num_blocks and self._kept:
            self._drop(next(iter(self._kept)))
        return self.pool.num_free >= num_blocks

    def attach(self, seq: Sequence, parent: Sequence | None, fresh: Container[int] = ()) -> None:
        """Give a sequence that has nothing the blocks that it can share, and mark them computed.

        At least one token is left to compute: its logits are needed. `parent` is the live sequence, of the same
        policy, that it forks from, if there is one. `fresh` blocks are filled by the very pass that is being
        planned: they can be shared whole, but not copied, since copies come before the pass."""
        if seq.request.parent is not None:
            key = (seq.policy, seq.request.parent.id)
            kept = _snapshot(parent) if parent is not None else self._kept.get(key)
            if kept is not None:
                self._fork(seq, kept, seq.request.parent.keep, fresh)
        if not seq.blocks:
            seq.kv_version = self.versions[seq.policy]
            self._match(seq)

    def index(self, seq: Sequence, num_computed: int) -> None:
        """Enter the blocks that are full once `num_computed` tokens are. Sequences that hold keys of older
        weights are left out: they are right for themselves only."""
        if not self._enabled or not self.is_current(seq):
            return
        size = self.pool.block_size
        while (seq.num_indexed + 1) * size <= num_computed:
            start = seq.num_indexed * size
            run = _run(seq.tokens[start : start + size])
            seq.node = self.pool.register(seq.blocks[seq.num_indexed], self._weights(seq), seq.node, run)
            seq.num_indexed += 1

    def keep(self, seq: Sequence) -> None:
        """Take over the blocks of a finished sequence."""
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
        """Give a sequence's blocks back and forget that anything of it was computed."""
        for block in reversed(seq.blocks):
            self.pool.release(block)
        seq.blocks = []
        seq.num_computed = 0
        seq.node = ROOT
        seq.num_indexed = 0
        seq.kv_version = None

    def new_version(self, policy: str, version: int, *, forget_kept: bool) -> None:
        """New weights of a policy, or those of a new one: its equal prefixes no longer have equal keys. Its kept
        requests go only when caches are rebuilt."""
        if policy in self.versions:
            self.pool.forget_weights((policy, self.versions[policy]))
        self.versions[policy] = version
        if forget_kept:
            self._drop_kept(policy)

    def forget_policy(self, policy: str) -> None:
        """It is no longer served, and none of its sequences is left."""
        self.pool.forget_weights((policy, self.versions.pop(policy)))
        self._drop_kept(policy)

    def is_current(self, seq: Sequence) -> bool:
        """Whether all its keys and values come from the weights that are served."""
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
        seq.blocks = list(kept.blocks[: -(-usable // size)])
        for block in seq.blocks:
            self.pool.share(block)
        seq.num_computed = usable
        seq.kv_version = kept.kv_version
        if self.is_current(seq):
            self._walk(seq, usable // size)

    def _walk(self, seq: Sequence, num_blocks: int) -> None:
        """Find the trie node of a fork's shared blocks, so that what it adds can be indexed too."""
        size = self.pool.block_size
        for number in range(num_blocks):
            run = _run(seq.tokens[number * size : (number + 1) * size])
            found = self.pool.find(self._weights(seq), seq.node, run)
            if found is None:
                return
            seq.node = found[1]
            seq.num_indexed += 1

    def _match(self, seq: Sequence) -> None:
        if not self._enabled:
            return
        size = self.pool.block_size
        while (seq.num_indexed + 1) * size < seq.num_tokens:
            start = seq.num_indexed * size
            found = self.pool.find(self._weights(seq), seq.node, _run(seq.tokens[start : start + size]))
            if found is None:
                return
            block, seq.node = found
            self.pool.share(block)
            seq.blocks.append(block)
            seq.num_indexed += 1
            seq.num_computed += size


def _snapshot(seq: Sequence) -> Kept:
    return Kept(tokens=seq.tokens[: seq.num_computed], blocks=tuple(seq.blocks), kv_version=seq.kv_version)


def _run(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()
