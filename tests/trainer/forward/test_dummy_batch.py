import pytest

from penstock.trainer.forward.dummy_batch import dummy_batch


@pytest.mark.parametrize("tokens", [1, 8, 100, 1000, 4096, 16384])
@pytest.mark.parametrize("longest", [32, 300, 4096])
@pytest.mark.parametrize("shared", [True, False])
def test_a_row_is_as_long_as_a_micro_batch_and_keeps_to_the_positions_of_the_model(tokens, longest, shared):
    row = dummy_batch(500, tokens, "cpu", longest=longest, shared_prompts=shared)
    assert row.input_ids.shape[1] == sum(row.lengths) == tokens
    assert int(row.position_ids.max()) < longest
    assert int(row.input_ids.max()) < 500


@pytest.mark.parametrize("shared", [True, False])
def test_groups_share_their_prompt_and_nothing_else(shared):
    row = dummy_batch(500, 16384, "cpu", longest=4096, shared_prompts=shared)
    assert row.members == ((3,) * len(row.members) if shared else ())
    prompts = [37 + group % 16 for group in range(len(row.members))]
    assert row.num_shared_tokens == 2 * sum(prompts)
    assert len(row.members) > 20 or not shared


def test_no_two_sizes_of_a_row_are_the_same():
    """Of its tokens, its segments' boundaries, and the longest: a compiler takes equal sizes for one."""
    row = dummy_batch(500, 16384, "cpu", longest=4096, shared_prompts=True)
    sizes = [row.input_ids.shape[1], len(row.lengths) + 1, max(row.lengths), row.num_loss_tokens]
    sizes.append(row.input_ids.shape[1] + row.num_shared_tokens)
    assert len(set(sizes)) == len(sizes)
