import pytest

from penstock.trainer.warming import ANSWERS, made_up_row


@pytest.mark.parametrize("tokens", [1000, 4096, 16384])
@pytest.mark.parametrize("shared", [True, False])
def test_a_row_is_nearly_as_long_as_a_micro_batch(tokens, shared):
    row = made_up_row(500, tokens, "cpu", shared_prompts=shared)
    length = row.input_ids.shape[1]
    assert tokens - sum(ANSWERS) - 3 * 60 < length <= tokens
    assert int(row.input_ids.max()) < 500
    assert bool(row.members) == shared
    groups = len(row.sequences) // len(ANSWERS)
    prompts = sum(37 + group % 16 for group in range(groups))
    assert row.num_shared_tokens == (2 * prompts if shared else 0)
    assert row.num_loss_tokens == groups * sum(ANSWERS)


def test_no_two_sizes_of_a_row_are_the_same():
    """Of its tokens, its segments' boundaries, and the longest: a compiler takes equal sizes for one."""
    row = made_up_row(500, 16384, "cpu", shared_prompts=True)
    sizes = [row.input_ids.shape[1], len(row.lengths) + 1, max(row.lengths), row.num_loss_tokens]
    sizes.append(row.input_ids.shape[1] + row.num_shared_tokens)
    assert len(set(sizes)) == len(sizes)


def test_there_is_a_row_even_if_no_group_fits():
    assert made_up_row(500, 8, "cpu", shared_prompts=True).num_loss_tokens == sum(ANSWERS)
