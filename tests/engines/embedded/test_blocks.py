from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.embedded.blocks import ROOT, BlockPool

V0, V1 = ("policy", 0), ("policy", 1)
OTHER = ("other", 0)


def test_a_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.share(block)
    assert (pool.num_free, pool.owners(block)) == (1, 2)
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert (pool.num_free, pool.owners(block)) == (2, 0)


def test_known_content_is_found_and_can_be_owned_again() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    node = pool.register(block, V0, ROOT, b"abcd")
    assert pool.find(V0, ROOT, b"abcd") == (block, node)
    assert pool.find(V0, node, b"abcd") is None
    pool.release(block)
    assert pool.num_free == 2
    pool.share(block)
    assert (pool.num_free, pool.owners(block)) == (1, 1)


def test_the_first_of_equal_contents_stays_known() -> None:
    pool = BlockPool(2, 4)
    first, second = pool.allocate(), pool.allocate()
    node = pool.register(first, V0, ROOT, b"abcd")
    assert pool.register(second, V0, ROOT, b"abcd") == node
    assert pool.find(V0, ROOT, b"abcd") == (first, node)
    pool.release(second)
    assert pool.allocate() == second


def test_unknown_blocks_are_given_before_known_ones_and_the_oldest_known_first() -> None:
    pool = BlockPool(3, 4)
    blocks = [pool.allocate() for _ in range(3)]
    pool.register(blocks[0], V0, ROOT, b"a")
    pool.register(blocks[1], V0, ROOT, b"b")
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    assert [pool.allocate() for _ in range(3)] == [blocks[2], blocks[1], blocks[0]]
    assert pool.find(V0, ROOT, b"a") is None
    assert pool.find(V0, ROOT, b"b") is None


def test_a_block_about_to_be_overwritten_is_forgotten() -> None:
    pool = BlockPool(1, 4)
    block = pool.allocate()
    pool.register(block, V0, ROOT, b"a")
    pool.unindex(block)
    pool.unindex(block)
    assert pool.find(V0, ROOT, b"a") is None
    pool.release(block)
    assert pool.num_free == 1


def test_clearing_the_index_frees_what_was_only_kept_for_it() -> None:
    pool = BlockPool(2, 4)
    kept, owned = pool.allocate(), pool.allocate()
    pool.register(kept, V0, ROOT, b"a")
    pool.register(owned, V0, ROOT, b"b")
    pool.release(kept)
    pool.clear_index()
    assert pool.find(V0, ROOT, b"a") is None
    assert pool.find(V0, ROOT, b"b") is None
    assert pool.num_free == 1
    pool.release(owned)
    assert pool.num_free == 2


def test_equal_content_under_other_weights_is_other_content() -> None:
    pool = BlockPool(3, 4)
    blocks = {weights: pool.allocate() for weights in (V0, OTHER)}
    for weights, block in blocks.items():
        pool.register(block, weights, ROOT, b"a")
    for weights, block in blocks.items():
        found = pool.find(weights, ROOT, b"a")
        assert found is not None
        assert found[0] == block
    assert pool.find(V1, ROOT, b"a") is None
    for block in blocks.values():
        pool.release(block)
    pool.forget_weights(V0)
    assert pool.find(V0, ROOT, b"a") is None
    assert pool.find(OTHER, ROOT, b"a") is not None
    assert pool.num_free == 3


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=200))
def test_owners_and_free_blocks_always_add_up(moves: list[tuple[int, int]]) -> None:
    pool = BlockPool(6, 4)
    held: list[int] = []
    for move, pick in moves:
        if move == 0 and pool.num_free:
            held.append(pool.allocate())
        elif move == 1 and held:
            held.append(held[pick % len(held)])
            pool.share(held[-1])
        elif move == 2 and held:
            pool.release(held.pop(pick % len(held)))
        elif move == 3 and held:
            pool.register(held[pick % len(held)], V0, ROOT, bytes([pick]))
        elif move == 4:
            found = pool.find(V0, ROOT, bytes([pick]))
            if found is not None:
                pool.share(found[0])
                held.append(found[0])
        assert pool.num_free == 6 - len(set(held))
        assert all(pool.owners(block) == held.count(block) for block in range(6))
    for block in held:
        pool.release(block)
    assert pool.num_free == 6
