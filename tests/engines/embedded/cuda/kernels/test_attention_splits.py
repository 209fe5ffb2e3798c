from tests.triton_device import DEVICE  # noqa: F401  (before Triton, which may have to interpret)

from penstock.engines.embedded.cuda.kernels import attention_splits as splits  # isort: skip


def test_splits_follow_the_longest_sequence():
    assert splits.choose_splits(rows=512, kv_heads=2, longest=1024) == 1
    assert splits.choose_splits(rows=512, kv_heads=2, longest=1025) == 4
    assert splits.choose_splits(rows=8, kv_heads=2, longest=600) == 4
    assert splits.choose_splits(rows=8, kv_heads=2, longest=512) == 1
    assert splits.choose_splits(rows=512, kv_heads=2, longest=8192) == 16
    assert splits.choose_splits(rows=1, kv_heads=2, longest=32768) == 64
    assert splits.choose_splits(rows=1, kv_heads=2, longest=1 << 20) == 64


def test_a_table_of_any_length_takes_no_more_splits_than_there_may_be():
    assert splits.keys_of_a_split(64 * 512, lines=16) == 512
    assert splits.keys_of_a_split(64 * 512 + 1, lines=16) == 528
    for longest in (70_000, 131_072, 1 << 20):
        keys = splits.keys_of_a_split(longest, lines=16)
        assert keys % 16 == 0
        assert splits.MAX_SPLITS - 1 < longest / keys <= splits.MAX_SPLITS
