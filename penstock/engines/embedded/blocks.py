"""Allocates the blocks of the paged cache, counts their owners, and indexes blocks by their content.

This is pure bookkeeping without tensors: a block is a number. A block with one owner may be written; a block
with several must be copied first (`Scheduler` plans the copy). A full block whose content is known is entered
into a trie of token runs, so that an equal prefix finds it again. A block without owners can still be found
until its room is needed; the oldest is reused first. Each version of each policy has a trie of its own, since
the same tokens have other keys and values under other weights.
"""

from collections import OrderedDict

ROOT = 0
"""The node of the empty prefix, in every trie."""
Weights = tuple[str, int]
"""A policy and its version; each has a trie of its own."""


class BlockPool:
    """Holds `num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._tries: dict[Weights, dict[tuple[int, bytes], tuple[int, int]]] = {}
        self._key_of: dict[int, tuple[Weights, int, bytes]] = {}
        self._num_nodes = ROOT

    @property
    def num_free(self) -> int:
        """Count the blocks that `allocate` can give: never used, given back, or only kept for their content."""
        return len(self._free) + len(self._idle)

    def owners(self, block: int) -> int:
        return self._owners[block]

    def allocate(self) -> int:
        """Return a block with one owner. The caller has checked `num_free`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add an owner to a block that is owned, or kept for its content."""
        if self._owners[block] == 0:
            del self._idle[block]
        self._owners[block] += 1

    def release(self, block: int) -> None:
        """Remove one owner of a block."""
        assert self._owners[block] > 0, f"block {block} was released more often than shared"
        self._owners[block] -= 1
        if self._owners[block] == 0:
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def register(self, block: int, weights: Weights, parent: int, run: bytes) -> int:
        """Enter a full block under its parent node and `run`, the bytes that identify its tokens; return its node.

        Keys are compared in full, so equal hashes can't confuse two prefixes. When the same content is already
        known, that entry stays and its node is returned.
        """
        trie = self._tries.setdefault(weights, {})
        known = trie.get((parent, run))
        if known is not None:
            return known[1]
        self._num_nodes += 1
        trie[parent, run] = (block, self._num_nodes)
        self._key_of[block] = (weights, parent, run)
        return self._num_nodes

    def find(self, weights: Weights, parent: int, run: bytes) -> tuple[int, int] | None:
        """Return the block and node that hold `run` after `parent` under these weights, or None."""
        return self._tries.get(weights, {}).get((parent, run))

    def unindex(self, block: int) -> None:
        """Forget an owned block's content because it is about to be overwritten."""
        if block in self._key_of:
            self._forget(block)

    def forget_weights(self, weights: Weights) -> None:
        """Forget all content of this version of a policy, because new requests are served by a later one."""
        for block, _ in self._tries.pop(weights, {}).values():
            self._key_of.pop(block, None)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def clear_index(self) -> None:
        """Forget the content of all blocks, under all weights."""
        for weights in list(self._tries):
            self.forget_weights(weights)

    def _forget(self, block: int) -> None:
        weights, parent, run = self._key_of.pop(block)
        del self._tries[weights][parent, run]
