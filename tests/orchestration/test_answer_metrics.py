import numpy as np

from penstock.orchestration.answer_metrics import answer_metrics, reward_means, step_metrics
from penstock.types import Episode, FinishReason, Group, SamplingParams, Score, ScoredGroup, Task, Turn


def turn(count: int, finish_reason: FinishReason) -> Turn:
    return Turn(
        prompt_ids=np.array([1, 2, 3], np.int32),
        output_ids=np.arange(count, dtype=np.int32),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        finish_reason=finish_reason,
        sampling=SamplingParams(max_tokens=99),
        text="",
    )


def scored(*episodes: tuple[tuple[Turn, ...], dict[str, float]], failures=()) -> ScoredGroup:
    group = Group(
        number=0,
        task=Task(id="t", prompt="p"),
        episodes=tuple(Episode(task_id="t", turns=turns) for turns, _ in episodes),
        failures=failures,
    )
    return ScoredGroup(group=group, scores=tuple(Score(value=0.0, parts=parts) for _, parts in episodes))


GROUPS = [
    scored(
        ((turn(4, "stop"),), {"exact": 1.0, "format": 0.5}),
        ((turn(9, "length"),), {"exact": 0.0}),
        failures=(Episode(task_id="t", turns=(turn(50, "length"),), failure="timeout"),),
    ),
    scored(((turn(2, "length"), turn(3, "stop")), {"exact": 0.5, "format": 1.0})),
]


def test_lengths_and_truncation_are_of_answers_that_did_not_fail() -> None:
    assert answer_metrics(GROUPS) == {
        "answer_tokens_mean": 6.0,
        "answer_tokens_max": 9.0,
        "truncated_fraction": 1 / 3,
    }
    assert answer_metrics([]) == {}


def test_rewritten_histories_and_unread_answers_are_counted_over_the_step() -> None:
    one = Episode(task_id="t", turns=(turn(4, "stop"),), rewrites={"client": 2, "template": 1})
    other = Episode(task_id="t", turns=(turn(4, "stop"),), rewrites={"client": 1}, unread_answers=2)
    group = Group(number=0, task=Task(id="t", prompt="p"), episodes=(one, other))
    metrics = answer_metrics([ScoredGroup(group=group, scores=(Score(value=0.0), Score(value=0.0)))])
    assert (metrics["rewritten_by_client"], metrics["rewritten_by_template"]) == (3.0, 1.0)
    assert metrics["unread_answers"] == 2.0


def test_every_function_has_its_mean_over_what_it_gave() -> None:
    assert reward_means(GROUPS) == {"exact": 0.5, "format": 0.75}


def test_a_function_never_takes_the_name_of_a_metric_of_the_trainer() -> None:
    groups = [scored(((turn(4, "stop"),), {"mean": 3.0, "exact": 1.0}))]
    row = step_metrics(groups, {"reward_mean": 0.25, "loss": 2.0})
    assert (row["reward_mean"], row["reward_function_mean"], row["reward_exact"]) == (0.25, 3.0, 1.0)
    assert (row["loss"], row["answer_tokens_max"]) == (2.0, 4.0)
