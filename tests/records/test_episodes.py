"""Turns that continue each other become one sample; whatever an episode did, no sampled token is lost or doubled."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.records import (
    NOT_SAMPLED,
    BlobRef,
    Episode,
    MaskRef,
    SamplingParams,
    Turn,
    TurnSpan,
    samples_of_turns,
)
from tests.records.builders import make_turn

VOCAB = 5


def a_turn(
    prompt: list[int],
    output: list[int],
    *,
    number: int = 0,
    temperature: float = 1.0,
    policy: str = "policy",
    masked: bool = False,
    **sampling: int,
) -> Turn:
    """A turn whose logprobs and versions tell its tokens from those of all others."""
    size = len(output)
    blob = BlobRef(key=f"group-0/{number}", num_bytes=4, checksum=0)
    mask = MaskRef(start=0, num_tokens=size, vocab_size=VOCAB, blob=blob)
    return make_turn(
        prompt,
        output,
        logprobs=-(100.0 * number + np.arange(size) + 1),
        versions=number,
        sampling=SamplingParams(temperature=temperature, seed=number, **sampling),
        policy=policy,
        sampling_masks=(mask,) if masked else (),
    )


@st.composite
def episodes(draw: st.DrawFn) -> list[Turn]:
    """Turns that start afresh, continue or fork from any earlier one, under settings that may change."""
    turns: list[Turn] = []
    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=3)
    for number in range(draw(st.integers(1, 6))):
        prompt = [draw(st.integers(0, VOCAB - 1))]
        if turns and draw(st.booleans()):
            base = turns[draw(st.integers(0, len(turns) - 1))].token_ids.tolist()
            keep = draw(st.sampled_from([len(base), max(1, len(base) - 1)]))
            prompt = base[:keep]
        turns.append(
            a_turn(
                prompt + draw(tokens),
                draw(tokens),
                number=number,
                temperature=draw(st.sampled_from([1.0, 1.0, 0.5])),
                policy=draw(st.sampled_from(["policy", "policy", "judge"])),
                masked=draw(st.booleans()),
            )
        )
    return turns


@given(episodes())
def test_every_sampled_token_is_in_the_loss_of_exactly_one_sample(turns: list[Turn]) -> None:
    samples = samples_of_turns(turns)
    assert sorted(span.turn for sample in samples for span in sample.turns) == list(range(len(turns)))
    for sample in samples:
        in_loss = np.zeros(len(sample.token_ids), dtype=np.bool_)
        for span in sample.turns:
            turn = turns[span.turn]
            assert sample.token_ids[: span.end].tolist() == turn.token_ids.tolist()
            assert sample.logprobs[span.start : span.end].tolist() == turn.logprobs.tolist()
            assert sample.versions[span.start : span.end].tolist() == turn.versions.tolist()
            assert not in_loss[span.start : span.end].any()
            in_loss[span.start : span.end] = True
        assert sample.loss_mask.tolist() == in_loss.tolist()
        assert (sample.versions != NOT_SAMPLED).tolist() == in_loss.tolist()
        assert not sample.logprobs[~in_loss].any()


@given(episodes())
def test_one_sample_holds_one_policy_and_one_distribution(turns: list[Turn]) -> None:
    for sample in samples_of_turns(turns):
        drawn = {(turns[span.turn].policy, turns[span.turn].sampling.temperature) for span in sample.turns}
        assert drawn == {(sample.policy, sample.sampling.temperature)}


@given(episodes())
def test_sampling_masks_stay_with_their_tokens(turns: list[Turn]) -> None:
    for sample in samples_of_turns(turns):
        masked = [span for span in sample.turns if turns[span.turn].sampling_masks]
        assert [(mask.start, mask.end) for mask in sample.sampling_masks] == [
            (span.start, span.end) for span in masked
        ]
        blobs = [turns[span.turn].sampling_masks[0].blob for span in masked]
        assert [mask.blob for mask in sample.sampling_masks] == blobs


def test_masks_lie_within_their_tokens_and_in_order() -> None:
    turn = a_turn([1], [1, 2, 3], masked=True)
    (mask,) = turn.sampling_masks
    for masks in [(mask.shifted(1),), (mask, mask), (mask.shifted(-1),)]:
        with pytest.raises(ValueError, match="Turn: its sampling masks must lie in order within 3 tokens"):
            msgspec.structs.replace(turn, sampling_masks=masks)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6))
def test_n_turns_that_only_append_pay_for_one_context(sizes: list[tuple[int, int]]) -> None:
    turns: list[Turn] = []
    context = [0]
    for number, (said, sampled) in enumerate(sizes):
        context = context + [1] * said
        turns.append(a_turn(context, [2] * sampled, number=number))
        context = context + [2] * sampled
    (sample,) = samples_of_turns(turns)
    assert sample.token_ids.tolist() == context
    assert sample.num_loss_tokens == sum(sampled for _, sampled in sizes)


def test_text_between_turns_is_context() -> None:
    first, second = a_turn([1], [2, 3], number=0), a_turn([1, 2, 3, 4], [0], number=1)
    (sample,) = Episode(task_id="t", turns=(first, second)).samples()
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 0]
    assert sample.loss_mask.tolist() == [False, True, True, False, True]
    assert sample.versions.tolist() == [-1, 0, 0, -1, 1]
    assert sample.logprobs.tolist() == [0, -1, -2, 0, -101]
    assert sample.turns == (TurnSpan(turn=0, start=1, end=3), TurnSpan(turn=1, start=4, end=5))


def test_a_sample_says_which_tokens_read_keys_of_older_weights() -> None:
    """Of a turn whose engine does not say, those behind a token of another version."""
    first, second = a_turn([1], [2, 3], number=0), a_turn([1, 2, 3, 4], [0], number=1)
    assert samples_of_turns([first, second])[0].mixed is None
    says = msgspec.structs.replace(first, mixed=np.array([False, True]))
    (sample,) = samples_of_turns([says, second])
    assert sample.mixed is not None
    assert sample.mixed.tolist() == [False, False, True, False, True]
    anew = msgspec.structs.replace(second, mixed=np.array([False]))
    (sample,) = samples_of_turns([first, anew])
    assert sample.mixed is not None
    assert not sample.mixed.any()
    with pytest.raises(ValueError, match="Turn: its columns must have one length"):
        msgspec.structs.replace(first, mixed=np.array([True]))


def test_the_second_of_two_forks_has_the_common_turn_as_context() -> None:
    first = a_turn([1], [2], number=0)
    left, right = a_turn([1, 2, 3], [4], number=1), a_turn([1, 2], [0], number=2)
    one, other = samples_of_turns([first, left, right])
    assert [span.turn for span in one.turns] == [0, 1]
    assert [span.turn for span in other.turns] == [2]
    assert other.loss_mask.tolist() == [False, False, True]


def test_two_conversations_side_by_side_stay_apart() -> None:
    turns = [a_turn([1], [2]), a_turn([3], [4]), a_turn([1, 2], [0]), a_turn([3, 4], [0])]
    assert [[span.turn for span in sample.turns] for sample in samples_of_turns(turns)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"top_k": 3}, {"policy": "judge"}])
def test_other_settings_make_another_sample(changed: dict[str, object]) -> None:
    policy = str(changed.pop("policy", "policy"))
    later = a_turn([1, 2], [3], number=1, policy=policy)
    later = msgspec.structs.replace(later, sampling=msgspec.structs.replace(later.sampling, **changed))
    assert len(samples_of_turns([a_turn([1], [2]), later])) == 2


def test_where_a_turn_ends_is_no_other_distribution() -> None:
    assert len(samples_of_turns([a_turn([1], [2], max_tokens=9), a_turn([1, 2], [3], max_tokens=1)])) == 1


def test_a_failed_episode_has_nothing_to_train_on() -> None:
    episode = Episode(task_id="t", turns=(a_turn([1], [2]),), failure="timeout", message="too slow")
    assert episode.samples() == ()
    assert episode.num_output_tokens == 1
