from penstock.sync.mixing import walk_from


def test_places_count_beyond_32_bits() -> None:
    assert [walk_from(index) for index in (0, 1, 2, 2**32, 2**32 + 1)] == [
        0,
        0x61C88647,
        2 * 0x61C88647 - 2**32,
        0x2545F491,
        0x61C88647 + 0x2545F491 - 2**32,
    ]
