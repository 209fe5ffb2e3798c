import pytest

from penstock.algorithms.selection import (
    SELECTIONS,
    asymmetric,
    overlong_filter,
    overlong_penalty,
    select,
    zero_variance,
)
from tests.records.builders import make_turn, scored_episodes


def scored(values, *, lengths=None, reasons=None, number=0, version=0):
    """Two tokens an answer, and a version of its own for each, unless said otherwise."""
    turns = [
        make_turn([1], [1] * (lengths[n] if lengths else 2), versions=version + n, finish_reason=reason)
        for n, reason in enumerate(reasons or ["stop"] * len(values))
    ]
    return scored_episodes([[turn] for turn in turns], values, number=number)


def test_zero_variance_drops_equal_scores_and_single_episodes():
    assert zero_variance(scored([1, 1, 1])).drop == "zero_variance"
    assert zero_variance(scored([0.5])).drop == "zero_variance"
    assert zero_variance(scored([1, 1, 0])).drop is None
    assert zero_variance(scored([1, 1.05]), tolerance=0.1).drop == "zero_variance"


def test_overlong_filter_masks_truncated_episodes():
    selected = overlong_filter(scored([1, 0, 1], reasons=["stop", "length", "stop"]))
    assert selected.keep == (True, False, True)
    assert selected.drop is None
    assert [sample.num_loss_tokens for sample in selected.samples(1)] == [0]
    assert [sample.num_loss_tokens for sample in selected.samples(2)] == [2]


def test_overlong_penalty_by_hand():
    """Limit 10, margin 4: free up to 6, −¼ at 7, −1 from 10 on."""
    selected = overlong_penalty(scored([1, 1, 1, 1], lengths=[6, 7, 10, 12]), max_length=10, margin=4)
    assert [score.value for score in selected.scored.scores] == pytest.approx([1, 0.75, 0, 0])
    assert selected.scored.scores[1].parts == {"overlong_penalty": -0.25}
    assert selected.keep == (True,) * 4


def test_asymmetric_keeps_positives_and_a_share_of_the_rest():
    group = scored([1, 0, 0, 0, 1, 0, 0, 0, 0, 0], number=7)
    selected = asymmetric(group)
    assert selected.keep[0]
    assert selected.keep[4]
    assert sum(selected.keep) == 2 + 2
    assert asymmetric(group).keep == selected.keep
    kept = {asymmetric(scored([1] + [0] * 9, number=n), negative_fraction=0.1).keep for n in range(20)}
    assert len(kept) > 1
    assert asymmetric(group, negative_fraction=0.0).keep == tuple(score.value > 0.5 for score in group.scores)


def test_strict_positives_only():
    """Scores at the mean are not positive."""
    assert sum(asymmetric(scored([1, 1]), negative_fraction=0.0).keep) == 0


def test_selections_stack_in_order():
    group = scored([1, 1, 1], lengths=[2, 9, 9], reasons=["stop", "stop", "length"])
    stack = {"overlong_penalty": {"max_length": 10, "margin": 4}, "zero_variance": {}, "overlong_filter": {}}
    selected = select(group, stack)
    assert selected.drop is None
    assert selected.keep == (True, True, False)
    assert [score.value for score in selected.scored.scores] == pytest.approx([1, 0.25, 0.25])
    assert select(group, {"zero_variance": {}, **stack}).drop == "zero_variance"


def test_a_group_that_loses_every_episode_is_dropped():
    assert (
        select(scored([1, 0], reasons=["length", "length"]), {"overlong_filter": {}}).drop
        == "overlong_filter"
    )
    assert select(scored([1, 0]), {}).keep == (True, True)


def test_the_catalogue_is_whole():
    assert set(SELECTIONS.names()) == {"zero_variance", "overlong_filter", "overlong_penalty", "asymmetric"}
