import msgspec
import numpy as np
import pytest

from penstock.algorithms.config import AlgorithmConfig
from penstock.loop.admission import ReadyGroup, StepGroups, Ticket
from penstock.loop.attempts import Attempt
from penstock.loop.history import VersionHistory
from penstock.loop.step_planner import StepPlanner, TrainedStep
from penstock.observe.reading.token_trace import TokenTrace
from penstock.records import (
    Episode,
    FinishReason,
    Group,
    Score,
    ScoredGroup,
    StepResult,
    Task,
    TracedTokens,
    Turn,
)
from penstock.run.step_answers import (
    TokenVocabulary,
    answer_metrics,
    episode_advantages,
    reward_means,
    staleness_of,
    step_metrics,
    traced_tokens,
)
from penstock.trainer.step.packing import plan_step
from tests.records.builders import make_turn, scored_episodes


def answer(count: int, finish_reason: FinishReason) -> Turn:
    return make_turn([1, 2, 3], range(count), finish_reason=finish_reason)


def scored_of(*episodes: tuple[tuple[Turn, ...], dict[str, float]], failures=()) -> ScoredGroup:
    scores = [Score(value=0.0, parts=parts) for _, parts in episodes]
    return scored_episodes([turns for turns, _ in episodes], scores, failures=failures)


SCORED = [
    scored_of(
        ((answer(4, "stop"),), {"exact": 1.0, "format": 0.5}),
        ((answer(9, "length"),), {"exact": 0.0}),
        failures=(Episode(task_id="t", turns=(answer(50, "length"),), failure="timeout"),),
    ),
    scored_of(((answer(2, "length"), answer(3, "stop")), {"exact": 0.5, "format": 1.0})),
]


def test_lengths_and_truncation_are_of_answers_that_did_not_fail() -> None:
    assert answer_metrics(SCORED) == {
        "answer_tokens_mean": 6.0,
        "answer_tokens_max": 9.0,
        "truncated_fraction": 1 / 3,
    }
    assert answer_metrics([]) == {}


def test_rewritten_histories_and_unread_answers_are_counted_over_the_step() -> None:
    one = Episode(task_id="t", turns=(answer(4, "stop"),), rewrites={"client": 2, "template": 1})
    other = Episode(task_id="t", turns=(answer(4, "stop"),), rewrites={"client": 1}, unread_answers=2)
    group = Group(number=0, task=Task(id="t", prompt="p"), episodes=(one, other))
    metrics = answer_metrics([ScoredGroup(group=group, scores=(Score(value=0.0), Score(value=0.0)))])
    assert (metrics["rewritten_by_client"], metrics["rewritten_by_template"]) == (3.0, 1.0)
    assert metrics["unread_answers"] == 2.0


def test_every_function_has_its_mean_over_what_it_gave() -> None:
    assert reward_means(SCORED) == {"exact": 0.5, "format": 0.75}


def test_a_function_never_takes_the_name_of_a_metric_of_the_trainer() -> None:
    groups = [scored_of(((answer(4, "stop"),), {"mean": 3.0, "exact": 1.0}))]
    row = step_metrics(groups, {"reward_mean": 0.25, "loss": 2.0})
    assert (row["reward_mean"], row["reward_function_mean"], row["reward_exact"]) == (0.25, 3.0, 1.0)
    assert (row["loss"], row["answer_tokens_max"]) == (2.0, 4.0)


def rewarded(*rewards: float) -> ScoredGroup:
    """Episode n has n + 1 tokens."""
    return scored_episodes([[answer(n + 1, "stop")] for n in range(len(rewards))], rewards)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", [[-0.5, 0.5], [-1.0, 1.0]]),
        ("opo", [[-2 / 3, 1 / 3], [-4 / 3, 2 / 3]]),  # the second episode is twice as long
    ],
)
def test_every_episode_has_the_advantage_of_its_step(name: str, expected: list[list[float]]) -> None:
    found = episode_advantages(AlgorithmConfig(advantage=name), [rewarded(0.0, 1.0), rewarded(0.0, 2.0)])
    assert found is not None
    assert [values.tolist() for values in found] == [pytest.approx(values) for values in expected]


def test_where_tokens_have_their_own_there_is_none() -> None:
    assert episode_advantages(AlgorithmConfig(advantage="step_returns"), [rewarded(0.0, 1.0)]) is None


HISTORY = VersionHistory(steps=[0, 1, 3])


def ready(number: int, *versions: list[int]) -> ReadyGroup:
    """Of every second episode: those between were dropped."""
    turns = [
        make_turn([1, 2], range(10, 10 + len(of)), logprobs=-1.0, versions=of, text="x") for of in versions
    ]
    scored = scored_episodes([[turn] for turn in turns], [1.0] * len(turns), number=number)
    episodes = tuple(
        msgspec.structs.replace(episode, index=2 * episode.index) for episode in scored.group.episodes
    )
    scored = msgspec.structs.replace(scored, group=msgspec.structs.replace(scored.group, episodes=episodes))
    return ReadyGroup(
        ticket=Ticket(number=number, bound=4, deadline=9),
        scored=scored,
        samples=tuple(scored.samples(index) for index in range(len(episodes))),
        oldest_step=0,
        selected_at=4,
        steps_at_selection=(0, 1, 3),
    )


TAKEN = StepGroups(step=4, groups=(ready(5, [0, 1], [1, 2, 2]), ready(6, [2])))


def test_a_tokens_age_is_split_at_the_end_of_its_groups_generation() -> None:
    attempts = {number: Attempt(TAKEN.groups[0].ticket, "t") for number in (5, 6)}
    attempts[5].generated_at = 3
    told = staleness_of(TAKEN, attempts, 7.0)
    # Weights of steps 0, 1, 1, 3, 3 were seen by the first group, which waited for one step; those of step 3 by the
    # second, of whose end nothing is known.
    assert told.tokens == ((0, 1, 3), (2, 1, 2), (3, 1, 1))
    assert told.groups == ((1, 1), (4, 1))
    assert told.step == 5


def test_a_group_that_a_rollback_returned_keeps_its_ages() -> None:
    """It was selected for step 9 with versions of steps 5, 6 and 8, and the run went back to step 1."""
    returned = msgspec.structs.replace(ready(7, [0, 1, 2]), selected_at=9, steps_at_selection=(5, 6, 8))
    told = staleness_of(StepGroups(step=1, groups=(returned,)), {7: Attempt(returned.ticket, "t")}, 7.0)
    assert (told.tokens, told.groups) == (((0, 1, 1), (2, 1, 1), (3, 1, 1)), ((4, 1),))


def test_tokens_are_told_with_what_both_sides_know() -> None:
    trace = TracedTokens(
        group=0,
        episode=1,
        number=0,
        gaps=np.array([0.25, 0.5, np.nan], np.float32),
        advantages=np.ones(3, np.float32),
        weights=np.array([1, 1, 0], np.float32),
        clipped=np.array([0, 1, 0], np.float32),
    )
    result = StepResult(step=5, metrics={}, seconds={}, traces=(trace,))
    step = TrainedStep(number=5, taken=TAKEN, results=[result], waited_s=0, took_s=1, time_s=9)
    (event,) = traced_tokens(step, 9.0)
    found = TokenTrace.of(event, {})
    assert (found.step, found.group, found.episode, found.sample) == (5, 5, 2, 0)
    assert found.token_ids.tolist() == [1, 2, 10, 11, 12]
    assert found.ages.tolist() == [-1, -1, 3, 1, 1]
    assert found.trainer_logprobs.tolist()[2:4] == [-0.75, -0.5]
    assert found.clipped.tolist() == [255, 255, 0, 1, 0]
    assert found.worst == 3


def test_each_id_is_told_once() -> None:
    trace = TracedTokens(
        group=1,
        episode=0,
        number=0,
        gaps=np.zeros(1, np.float32),
        advantages=np.zeros(1, np.float32),
        weights=np.ones(1, np.float32),
    )
    result = StepResult(step=5, metrics={}, seconds={}, traces=(trace,))
    step = TrainedStep(number=5, taken=TAKEN, results=[result], waited_s=0, took_s=1, time_s=9)
    events = list(traced_tokens(step, 9.0))
    vocabulary = TokenVocabulary(lambda ids: "" if ids == [2] else f"t{ids[0]}")
    assert vocabulary.new_texts(events) == {1: "t1", 2: "<2>", 10: "t10"}
    assert vocabulary.new_texts(events) == vocabulary.new_texts([]) == {}


def test_every_step_asks_for_other_groups_and_repeats_itself() -> None:
    planner = StepPlanner(plan_step=plan_step, ranks=1, micro_batch_tokens=100, traced=2)
    asked = planner.plan(TAKEN, HISTORY, None)[0].traced
    assert asked == planner.choose_traced(TAKEN) == ((0, 0), (0, 1))
    assert planner.choose_traced(StepGroups(step=5, groups=TAKEN.groups)) == ((1, 0), (0, 0))
    assert StepPlanner(plan_step=plan_step, ranks=1, micro_batch_tokens=100).choose_traced(TAKEN) == ()
