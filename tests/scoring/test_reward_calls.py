"""Both forms of reward functions called, and everything that can go wrong inside them."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.errors import ScoringFailed
from penstock.records import Episode, Score, Task
from penstock.scoring.functions import wrap
from penstock.scoring.reward_calls import score_episodes, score_group
from penstock.scoring.scoring_process import TrainerState
from tests.scoring.groups import CHAT, a_group


def values(*calls: Callable[..., Any], group: Any = None) -> list[float]:
    group = group or a_group("2", "3")
    rewards = [wrap(call, name=f"r{index}") for index, call in enumerate(calls)]
    return [score.value for score in score_group(rewards, group)]


def failure(call: Callable[..., Any], group: Any = None) -> ScoringFailed:
    with pytest.raises(ScoringFailed) as raised:
        score_group([wrap(call, name="r")], group or a_group("2", "3"))
    return raised.value


def test_plain_form() -> None:
    def reward(task: Task, completion: str) -> float:
        return float(completion == task.columns["answer"])

    assert values(reward, group=a_group("2", "3", "2", answer="2")) == [1.0, 0.0, 1.0]


def test_plain_form_with_other_names_defaults_and_callable_objects() -> None:
    class Length:
        def __call__(self, item: Task, text: str, /, scale: float = 2.0) -> float:
            return scale * len(text)

    assert values(Length(), group=a_group("ab", "")) == [4.0, 0.0]


def test_async_plain_form_runs_all_episodes_at_once() -> None:
    started = 0
    both = asyncio.Event()

    async def reward(task: Task, completion: str) -> float:
        nonlocal started
        started += 1
        if started == 2:
            both.set()
        await both.wait()
        return float(completion)

    assert values(reward) == [2.0, 3.0]


def test_trl_form_gets_aligned_lists_of_everything() -> None:
    seen: dict[str, Any] = {}

    def f(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [0.5, 1.5]

    assert values(f, group=a_group("2", "3", answer="2", level=7)) == [0.5, 1.5]
    logs = {name: seen[name] for name in ("log_extra", "log_metric")}
    assert all(callable(log) for log in logs.values())
    assert seen == {
        "prompts": ["1+1=", "1+1="],
        "completions": ["2", "3"],
        "completion_ids": [[50], [51]],
        "answer": ["2", "2"],
        "level": [7, 7],
        "trainer_state": TrainerState(),
        **logs,
    }


def test_what_a_trl_function_logs_comes_with_its_scores() -> None:
    """As in TRL, several values of a metric in a call are averaged, and a column may be given in pieces."""

    def f(completions: list[str], trainer_state: Any, log_extra: Any, log_metric: Any) -> list[float | None]:
        log_metric("step", trainer_state.global_step / trainer_state.max_steps)
        for value, completion in enumerate(completions):
            log_metric("seen", value)
            log_extra("text", [completion])
        log_extra("length", [len(completion) for completion in completions])
        return [1.0, None, 0.5]

    group, training = a_group("a", "bc", "def"), TrainerState(global_step=3, max_steps=12)
    rewards = [wrap(f, name="f"), wrap(lambda task, completion: 0.0, name="g")]
    scores = asyncio.run(score_episodes(rewards, group.task, group.episodes, training))
    assert [score.parts for score in scores] == [
        {"f": 1.0, "f.step": 0.25, "f.seen": 1.0, "g": 0.0},
        {"g": 0.0},
        {"f": 0.5, "f.step": 0.25, "f.seen": 1.0, "g": 0.0},
    ]
    assert [score.extra for score in scores] == [
        {"f.text": "a", "f.length": "1"},
        {},
        {"f.text": "def", "f.length": "3"},
    ]


def test_what_is_logged_must_be_numbers_and_a_value_for_each_completion() -> None:
    def short(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("x", [1])
        return [0.0, 0.0]

    def wordy(completions: list[str], log_metric: Any) -> list[float]:
        log_metric("x", "many")
        return [0.0, 0.0]

    assert str(failure(short)).endswith("log_extra of 'x' must get one value per completion, 2, got 1")
    assert str(failure(wordy)).endswith("log_metric must return numbers, got str")


def test_trl_form_gets_only_what_it_has_parameters_for() -> None:
    def f(completions: list[str], answer: list[str]) -> list[float]:
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    assert values(f, group=a_group("2", "3", answer="2", level=7)) == [1.0, 0.0]


def test_trl_conversational_form() -> None:
    seen: list[Any] = []

    def f(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        seen.append((prompts, completions))
        return [float(completion[0]["content"]) for completion in completions]

    assert values(f, group=a_group("2", "3", prompt=CHAT)) == [2.0, 3.0]
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
    assert seen == [
        (
            [prompt, prompt],
            [[{"role": "assistant", "content": "2"}], [{"role": "assistant", "content": "3"}]],
        )
    ]


def test_async_trl_form() -> None:
    async def f(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(completion) for completion in completions]

    assert values(f) == [2.0, 3.0]


def test_a_column_never_hides_what_was_sampled() -> None:
    def f(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(completion) for completion in completions]

    assert values(f, group=a_group("2", "3", completions="9")) == [2.0, 3.0]


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_values_may_come_as_any_array(kind: Callable[[list[float]], Any]) -> None:
    assert values(lambda completions: kind([1, 0.5])) == [1.0, 0.5]


def test_numbers_of_any_kind() -> None:
    group = a_group("a", "b", "c")
    assert values(lambda completions: [True, np.float32(0.5), 3], group=group) == [1.0, 0.5, 3.0]


def test_the_score_is_the_weighted_sum_and_its_parts_are_raw() -> None:
    rewards = [
        wrap(lambda task, completion: float(completion), name="number", weight=2.0),
        wrap(lambda completions: [1.0, 0.0], name="first", weight=-0.5),
    ]
    scores = score_group(rewards, a_group("2", "3"))
    assert [(score.value, score.parts) for score in scores] == [
        (3.5, {"number": 2.0, "first": 1.0}),
        (6.0, {"number": 3.0, "first": 0.0}),
    ]


def test_none_in_trl_form_contributes_nothing_to_that_sample() -> None:
    rewards = [
        wrap(lambda completions: [None, 1.0], name="code"),
        wrap(lambda task, completion: 0.25, name="style"),
    ]
    scores = score_group(rewards, a_group("2", "3"))
    assert [(score.value, score.parts) for score in scores] == [
        (0.25, {"style": 0.25}),
        (1.25, {"code": 1.0, "style": 0.25}),
    ]


def test_a_sample_that_no_function_applies_to_fails_the_group() -> None:
    error = failure(lambda completions: [1.0, None])
    assert error.reason == "score_shape"
    assert str(error) == "task 't': no reward function gave a value for episode 1"


def test_a_function_that_raises() -> None:
    def reward(task: Task, completion: str) -> float:
        return 1 / 0

    error = failure(reward)
    assert error.reason == "score_error"
    assert str(error) == "reward 'r' on task 't' raised ZeroDivisionError: division by zero"
    assert "return 1 / 0" in error.detail


def test_a_function_that_exits_costs_only_its_group() -> None:
    def reward(task: Task, completion: str) -> float:
        raise SystemExit(3)

    assert failure(reward).reason == "score_error"


def test_a_missing_column_is_the_functions_error() -> None:
    def f(completions: list[str], answer: list[str]) -> list[float]:
        return [0.0] * len(answer)

    error = failure(f)
    assert error.reason == "score_error"
    assert "missing 1 required positional argument: 'answer'" in str(error)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_values_that_are_not_finite(value: float) -> None:
    error = failure(lambda task, completion: value)
    assert error.reason == "score_nan"
    assert str(error).startswith(f"reward 'r' on task 't' returned {float(value):g}; a reward must be finite")


@pytest.mark.parametrize(("value", "shown"), [(1e308, "1e+308"), (-3.5e38, "-3.5e+38"), (10**400, "inf")])
def test_values_that_float32_does_not_hold(value: float, shown: str) -> None:
    """The trainer computes with float32, where they would be infinite."""
    error = failure(lambda task, completion: value)
    assert error.reason == "score_nan"
    assert f"returned {shown}; a reward must be finite and within ±3.4e+38" in str(error)


def test_a_sum_that_is_not_finite() -> None:
    rewards = [wrap(lambda task, completion: 3e38, name=name, weight=10.0) for name in "ab"]
    with pytest.raises(ScoringFailed, match=r"the rewards add up to 6e\+39") as raised:
        score_group(rewards, a_group("2"))
    assert raised.value.reason == "score_nan"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda completions: [1.0], "must return one value per completion, 2, got 1"),
        (lambda completions: 1.0, "must return a list of numbers, got float"),
        (lambda completions: None, "must return a list of numbers, got None"),
        (lambda completions: "12", "must return a list of numbers, got str"),
        (lambda completions: ["1", "2"], "must return numbers, got str"),
        (lambda task, completion: None, "must return numbers, got None"),
        (lambda task, completion: "1", "must return numbers, got str"),
        (lambda task, completion: [1.0], "must return numbers, got list"),
    ],
)
def test_wrong_shapes(call: Callable[..., Any], sentence: str) -> None:
    error = failure(call)
    assert error.reason == "score_shape"
    assert str(error) == f"reward 'r' on task 't' {sentence}"


def test_a_second_parameter_named_episode_gets_the_whole_record() -> None:
    def reward(task: Task, episode: Episode) -> float:
        return float(len(episode.turns[0].output_ids))

    assert values(reward, group=a_group("abc", "")) == [3.0, 0.0]


def test_an_async_function_may_return_a_score() -> None:
    async def reward(task: Task, completion: str) -> Score:
        await asyncio.sleep(0)
        return Score(value=float(completion), parts={"half": float(completion) / 2})

    first, second = score_group([wrap(reward, name="r")], a_group("2", "3"))
    assert (first.value, first.parts) == (2.0, {"r": 2.0, "r.half": 1.0})
    assert (second.value, second.parts) == (3.0, {"r": 3.0, "r.half": 1.5})


def test_a_score_in_trl_form_is_refused() -> None:
    error = failure(lambda completions: [Score(value=1.0), Score(value=1.0)])
    assert str(error) == "reward 'r' on task 't' must return numbers, got Score"


def test_functions_that_ask_for_a_device_get_it() -> None:
    def plain(task: Task, completion: str, device: str) -> float:
        return float(device == "cuda:0")

    def trl(completions: list[str], device: str) -> list[float]:
        return [float(device == "cuda:0")] * len(completions)

    rewards = [wrap(plain, device="cuda:0"), wrap(trl, device="cuda:0")]
    assert [score.value for score in score_group(rewards, a_group("x", "y"))] == [2.0, 2.0]
    assert values(plain) == [0.0, 0.0]


def test_a_tasks_own_column_goes_before_the_device() -> None:
    def trl(completions: list[str], device: list[str]) -> list[float]:
        return [float(one == "laptop") for one in device]

    assert values(trl, group=a_group("x", device="laptop")) == [1.0]


def test_of_functions_that_are_awaited_the_first_failure_ends_the_others() -> None:
    ended = []

    async def reward(task: Task, completion: str) -> float:
        try:
            if completion == "3":
                raise SystemExit("no judge")
            await asyncio.Event().wait()
        finally:
            ended.append(completion)
        return 0.0

    error = failure(reward)
    assert (error.reason, str(error)) == ("score_error", "reward 'r' on task 't' raised SystemExit: no judge")
    assert sorted(ended) == ["2", "3"]


def test_in_trls_form_a_function_gets_copies_too() -> None:
    def f(completions: list[str], words: list[list[str]]) -> list[float]:
        words[0].append("more")
        return [float(len(words[0]))] * len(completions)

    group = a_group("x", words=["one"])
    assert values(f, group=group) == values(f, group=group) == [2.0]


def test_the_message_of_an_error_is_bounded() -> None:
    def reward(task: Task, completion: str) -> float:
        raise ValueError("x" * 3_000_000)

    error = failure(reward)
    assert (len(str(error)), len(error.detail)) == (2000, 20_000)
