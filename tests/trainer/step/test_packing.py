import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.step.packing import pack, plan_step, share_out
from penstock.trainer.step.sharing import forward_length, loss_positions
from tests.records.builders import make_turn, scored_episodes
from tests.trainer.builders import make_groups

COSTS = st.lists(st.integers(1, 60), max_size=60)


@given(COSTS, st.integers(1, 80), st.integers(1, 5))
def test_packing_places_everything_once_within_the_budget(costs, budget, ranks):
    bins = pack(costs, budget, multiple_of=ranks)
    assert sorted(index for members in bins for index in members) == list(range(len(costs)))
    assert len(bins) % ranks == 0
    for members in bins:
        assert len(members) <= 1 or sum(costs[index] for index in members) <= budget


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 80))
def test_packing_is_not_wasteful(costs, budget):
    """Never more than twice the bins that the total asks for, plus one."""
    assert len(pack(costs, budget)) <= 2 * -(-sum(costs) // budget) + 1


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 6))
def test_every_rank_gets_as_many_micro_batches(sizes, ranks):
    sizes = sizes[: len(sizes) - len(sizes) % ranks]
    shares = share_out(sizes, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    assert len({len(share) for share in shares}) == 1


def test_ranks_are_balanced():
    shares = share_out([9, 8, 7, 3, 2, 1], 2)
    assert sorted(sum([9, 8, 7, 3, 2, 1][index] for index in share) for share in shares) == [14, 16]
    with pytest.raises(ValueError, match="can't be dealt equally"):
        share_out([1, 2, 3], 2)


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(5, 60))
def test_plans_hold_every_sample_once_and_share_denominators(seed, ranks, budget):
    groups = make_groups(seed, shape=(3, 2, 4))
    plans = plan_step(4, groups, ranks=ranks, micro_batch_tokens=budget)
    assert len(plans) == ranks
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    sequences = [s for plan in plans for batch in plan.micro_batches for s in batch]
    assert sorted((s.group, s.episode) for s in sequences) == [
        (g, e) for g, size in enumerate((3, 2, 4)) for e in range(size)
    ]
    tokens = sum(e.num_output_tokens for g in groups for e in g.group.episodes)
    for plan in plans:
        assert (plan.step, plan.publishes, plan.ages) == (4, None, ({0: 3},) * len(groups))
        assert plan.num_loss_tokens == tokens
        assert plan.num_sequences == 9
        assert plan.scores == tuple(group.scores for group in groups)
        assert plan.num_tokens == tuple(tuple(e.num_output_tokens for e in g.group.episodes) for g in groups)
        for batch in plan.micro_batches:
            cost = sum(forward_length(s.sample) for s in batch)
            assert len(batch) <= 1 or cost <= budget
            for s in batch:
                (span,) = s.sample.turns
                turn = groups[s.group].group.episodes[s.episode].turns[span.turn]
                assert span.start == len(turn.prompt_ids)
                assert span.end == len(turn.prompt_ids) + len(turn.output_ids)


def test_attention_counts_as_work():
    """Of two micro-batches of about as many tokens, the rank with the longest sequence gets the one whose sequences
    are short, although it has more tokens."""
    groups = [
        scored_episodes([[make_turn([0], np.zeros(length))]], [1.0], number=number, task_id=str(number))
        for number, length in enumerate([8000, 6000, 5000] + [1100] * 8)
    ]
    plans = plan_step(1, groups, ranks=2, micro_batch_tokens=9000)
    found = [
        [[forward_length(sequence.sample) for sequence in batch] for batch in plan.micro_batches]
        for plan in plans
    ]
    assert found == [[[8000], [1100] * 6], [[6000, 1100], [5000, 1100]]]


def test_masked_samples_leave_the_plan_and_its_denominators():
    groups = make_groups(0, shape=(2,), version=3)

    first, second = (episode.samples() for episode in groups[0].group.episodes)
    masked = [sample.in_loss_where(sample.versions > 8) for sample in first]
    (plan,) = plan_step(10, groups, micro_batch_tokens=100, samples=[[masked, second]])
    assert [s.episode for batch in plan.micro_batches for s in batch] == [1]
    assert plan.num_sequences == 1
    assert plan.num_loss_tokens == groups[0].group.episodes[1].num_output_tokens
    assert len(plan.scores[0]) == 2


def test_a_plan_knows_the_age_of_every_version_in_each_group():
    """Of a group that a rollback returned it may be another one than of its neighbours."""
    groups = [
        *make_groups(0, shape=(1,), version=3),
        *make_groups(1, shape=(2,), version=5),
        *make_groups(2, shape=(1,), version=5),
    ]
    ages = [{3: 0}.__getitem__, {5: 1}.__getitem__, {5: 7}.__getitem__]
    (plan,) = plan_step(2, groups, micro_batch_tokens=100, publishes=6, age_of=ages, fresh=(4, 6))
    assert (plan.step, plan.publishes, plan.fresh) == (2, 6, (4, 6))
    assert plan.ages == ({3: 0}, {5: 1}, {5: 7})


def test_samples_of_another_policy_are_not_planned():
    groups = make_groups(0, shape=(2,))
    own, other = (episode.samples() for episode in groups[0].group.episodes)
    others = [msgspec.structs.replace(sample, policy="critic") for sample in other]
    (plan,) = plan_step(1, groups, micro_batch_tokens=100, samples=[[own, others]])
    assert [s.episode for batch in plan.micro_batches for s in batch] == [0]
    assert plan.num_sequences == 1


def test_a_first_token_is_never_in_the_loss_and_tails_are_not_forwarded():
    sample = make_groups(0)[0].group.episodes[0].samples()[0]
    mask = np.zeros(len(sample.token_ids), dtype=np.bool_)
    mask[[0, 2]] = True
    sample = msgspec.structs.replace(sample, loss_mask=mask)
    assert loss_positions(sample).tolist() == [2]
    assert forward_length(sample) == 2
    mask[2] = False
    assert forward_length(msgspec.structs.replace(sample, loss_mask=mask)) == 0


def test_an_empty_step_still_gives_every_rank_a_plan():
    plans = plan_step(1, [], ranks=2, micro_batch_tokens=10)
    assert [plan.micro_batches for plan in plans] == [((),), ((),)]


def test_planning_and_the_algorithm_catalogue_need_no_torch():
    code = (
        "import sys; import penstock.trainer.step.packing, penstock.trainer.config, penstock.algorithms.config;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("budget", "multiple"), [(0, 1), (5, 0)])
def test_bad_budgets_are_refused(budget, multiple):
    with pytest.raises(ValueError, match="must be >= 1"):
        pack([1], budget, multiple_of=multiple)
