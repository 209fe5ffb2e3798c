"""What an episode may still do."""

import msgspec
import pytest

from penstock.rollout.episode_record import EpisodeLimit, EpisodeRecord
from tests.rollout.contract import spec_of


def record(**limits: int) -> EpisodeRecord:
    spec = spec_of()
    sampling = msgspec.structs.replace(spec.sampling, max_tokens=8, temperature=1.0)
    return EpisodeRecord(msgspec.structs.replace(spec, sampling=sampling, **limits))


def test_tokens_are_reserved_when_a_turn_begins_and_given_back_when_it_made_fewer() -> None:
    episode = record(max_tokens=10)
    assert [episode.begin_turn({}, trains=True)[1].max_tokens for _ in range(2)] == [8, 2]
    with pytest.raises(EpisodeLimit, match="has sampled its 10 tokens"):
        episode.begin_turn({}, trains=True)
    assert (episode.is_limited, episode.num_begun) == (True, 2)
    episode.give_back(5)
    number, sampling = episode.begin_turn({"max_tokens": 7}, trains=True)
    assert (number, sampling.max_tokens) == (2, 5)


def test_turns_are_counted() -> None:
    episode = record(max_turns=1)
    assert episode.begin_turn({}, trains=True)[0] == 0
    assert not episode.is_limited
    with pytest.raises(EpisodeLimit, match="has had its 1 turns"):
        episode.begin_turn({}, trains=True)
    assert episode.is_limited


def test_settings_that_do_not_exist_or_do_not_train_are_refused_and_count_no_turn() -> None:
    episode = record()
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        episode.begin_turn({"temprature": 0.5}, trains=True)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        episode.begin_turn({"temperature": 0}, trains=True)
    assert episode.num_begun == 0
    assert episode.begin_turn({"temperature": 0}, trains=False)[1].temperature == 0


def test_the_last_reward_counts_and_must_be_finite() -> None:
    episode = record()
    episode.set_reward(1, {"style": 0})
    episode.set_reward(0.5, {})
    assert (episode.reward, episode.parts) == (0.5, {})
    with pytest.raises(ValueError, match="got nan for 'style'"):
        episode.set_reward(1.0, {"style": float("nan")})
    for value in (1e39, 10**400):
        with pytest.raises(
            ValueError, match=r"a reward must be finite and within ±3\.4e\+38, got .* for 'reward'"
        ):
            episode.set_reward(value, {})
    assert episode.reward == 0.5
