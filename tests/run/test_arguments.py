import math
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, UserError
from penstock.models.config import LoraConfig
from penstock.records import Message, Task
from penstock.run.arguments import Arguments, read_arguments, read_rewards
from penstock.scoring.builtin_rewards import exact_match
from penstock.tasks.task_rows import tasks_from_rows


def style(task: Task, completion: str) -> float:
    return 1.0


STYLE = f"{__name__}:style"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (style, [(STYLE, 1.0, None)]),
        ("auto", [("auto", 1.0, None)]),
        ((style, 0.5), [(STYLE, 0.5, None)]),
        ([style, "auto"], [(STYLE, 1.0, None), ("auto", 1.0, None)]),
        ([(style, 2), ("auto", 0.5)], [(STYLE, 2, None), ("auto", 0.5, None)]),
        ({"a": style, "b": ("auto", -1)}, [(STYLE, 1.0, "a"), ("auto", -1, "b")]),
        ([{"path": "auto", "weight": 3, "name": "n"}], [("auto", 3, "n")]),
        ({"path": "auto", "weight": 3}, [("auto", 3, None)]),
        ({"functions": {"a": (style, 4)}, "timeout_s": 2.0}, [(STYLE, 4, "a")]),
        ({"timeout_s": 2.0}, []),
    ],
)
def test_every_way_to_say_what_counts(given: Any, found: list[tuple[str, float, str | None]]) -> None:
    rewards, settings = read_rewards(given)
    assert [(one.path, one.weight, one.name) for one in rewards] == found
    assert settings == ({"timeout_s": 2.0} if isinstance(given, dict) and "timeout_s" in given else {})


def test_what_has_no_path_is_called_here_with_its_weight_and_name() -> None:
    (one,), _ = read_rewards({"short": (lambda task, completion: -len(completion), 0.25)})
    assert one.path is None
    reward = one.in_this_process("cpu")
    assert (reward.name, reward.weight, reward.call(None, "four")) == ("short", 0.25, -4)


def test_a_builtin_beside_it_keeps_its_name() -> None:
    reward = read_rewards("exact_match")[0][0].in_this_process("cpu")
    assert (reward.name, reward.call) == ("exact_match", exact_match)


@pytest.mark.parametrize("given", [3, None, [], {}, [3], {"a": 3}, (style, math.nan), [(style, math.inf)]])
def test_what_is_no_reward_is_one_sentence(given: Any) -> None:
    with pytest.raises(UserError, match="reward must be a (function, its path|finite number)"):
        read_rewards(given)


ROWS = [{"question": str(number), "answer": str(number)} for number in range(5)]
MORE = [{"question": f"{number}!", "answer": str(number)} for number in range(5)]


def read(config: Any = None, **given: Any) -> Arguments:
    named = {
        name: given.pop(name) for name in ("model", "tasks", "eval_tasks", "reward", "steps") if name in given
    }
    return read_arguments(config, sections=given, **named)


@pytest.mark.parametrize(
    "given",
    [
        {"config": {"tasks": {"prompt": "question", "limit": 2, "as_chat": True}}, "tasks": ROWS},
        {"tasks": {"rows": ROWS, "prompt": "question", "limit": 2, "as_chat": True}},
        {"config": {"tasks": {"rows": ROWS, "prompt": "question", "limit": 2, "as_chat": True}}},
    ],
)
def test_rows_are_read_as_the_tasks_section_says(given: dict[str, Any]) -> None:
    arguments = read(**given, model="m")
    assert arguments.tasks is not None
    tasks = tasks_from_rows(arguments.tasks, arguments.config.tasks)
    assert [task.id for task in tasks] == ["rows#0", "rows#1"]
    assert tasks[1].prompt == (Message(role="user", content="1"),)


@pytest.mark.parametrize("given", [{"eval_tasks": MORE}, {"eval": {"tasks": MORE, "every": 7}}])
def test_held_out_rows_are_read_as_the_others(given: dict[str, Any]) -> None:
    arguments = read(tasks={"rows": ROWS, "prompt": "question", "limit": 2}, **given)
    assert arguments.heldout is not None
    assert arguments.config.eval.tasks is not None
    tasks = tasks_from_rows(arguments.heldout, arguments.config.eval.tasks)
    assert [(task.id, task.prompt) for task in tasks][3:] == [
        ("heldout_rows#3", "3!"),
        ("heldout_rows#4", "4!"),
    ]
    assert arguments.config.eval.every == given.get("eval", {}).get("every", 0)


def test_a_source_named_later_goes_before_rows() -> None:
    arguments = read({"tasks": ROWS}, tasks="file.jsonl", eval_tasks="other.jsonl")
    assert (arguments.tasks, arguments.heldout) == (None, None)
    assert arguments.config.tasks.source == "file.jsonl"
    assert arguments.config.eval.tasks is not None
    assert arguments.config.eval.tasks.source == "other.jsonl"


def test_sections_are_laid_over_the_config_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("engine: {count: 2, embedded: {max_batch: 8, window: 4}}\ntrainer:\n")
    config = read(
        file, engine={"embedded": {"window": 2}}, trainer={"passes": 2}, steps=3, run={"name": "n"}
    ).config
    assert (config.engine.count, config.engine.embedded.max_batch, config.engine.embedded.window) == (2, 8, 2)
    assert (config.trainer.passes, config.run.steps, config.run.name) == (2, 3, "n")


def test_rewards_by_path_are_in_the_config_with_their_weights() -> None:
    arguments = read(reward={"functions": {"a": ("auto", 0.5), "b": "exact_match"}, "workers": 3})
    assert [(one.path, one.weight, one.name) for one in arguments.config.reward.functions] == [
        ("auto", 0.5, "a"),
        ("exact_match", 1.0, "b"),
    ]
    assert (arguments.config.reward.workers, arguments.local_rewards) == (3, ())


def test_one_reward_without_a_path_keeps_all_of_them_here() -> None:
    arguments = read(reward=[lambda task, completion: 1.0, ("auto", 0.5)])
    assert [one.weight for one in arguments.local_rewards] == [1.0, 0.5]


def own_part(*given: Any) -> Any:
    raise AssertionError("nothing calls it here")


OWN = {"loss": own_part, "advantage": own_part, "kl_estimator": own_part} | {
    name: {own_part: {}} for name in ("corrections", "engine_corrections", "selection")
}


@pytest.mark.parametrize("given", [{"algorithm": OWN}, {"config": {"algorithm": OWN}}])
def test_functions_of_the_algorithm_are_in_the_config_by_path(given: dict[str, Any]) -> None:
    algorithm = read(**given).config.algorithm
    assert algorithm.paths() == (f"{__name__}:own_part",) * 6


@pytest.mark.parametrize("name", ["loss", "corrections"])
def test_functions_that_no_process_can_import_are_refused(name: str) -> None:
    def inside(tokens: Any) -> Any:
        return tokens

    given = {"loss": inside, "corrections": {inside: {}}}[name]
    with pytest.raises(
        UserError, match="can't be imported by a worker process, which trains with it; define it"
    ):
        read(algorithm={name: given})


def test_the_demo_is_what_runs_when_nothing_is_named() -> None:
    assert read(steps=3).config.run.name == "demo"
    assert read(model="m").config.run.name == "run"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rollout": 4}, "rollout must be a section such as"),
        ({"config": {"rollout": 4}}, "rollout must be a section such as"),
        ({"eval": [*ROWS] * 99}, r"eval must be a section .{,400}; held-out tasks are eval_tasks=…$"),
        ({"rewards": len}, "^train has no argument 'rewards'; did you mean reward\\?$"),
        ({"step": 4}, "^train has no argument 'step'; did you mean steps\\?$"),
        (
            {"learning_rate": 1e-5},
            r"^train has no argument 'learning_rate'; did you mean trainer=\{'learning_rate': …\}\?$",
        ),
        (
            {"qqq": 4},
            "^train has no argument 'qqq'; it has model, tasks, .* and sections of the config: model,",
        ),
        ({"tasks": 4}, "tasks must be a source, a list of rows or a section, got 4"),
        ({"eval": {"tasks": 4}}, "eval.tasks must be a source"),
    ],
)
def test_what_fits_nowhere_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read(**given)


def test_an_unknown_key_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'limit'"):
        read(tasks={"rows": ROWS, "limits": 3})


def test_settings_of_the_model_without_its_name_are_for_the_model_that_is_there() -> None:
    demo = read_arguments(None, model={"lora": {"rank": 4}}, sections={}).config
    assert demo.model.name == "builtin"
    assert demo.model.lora == LoraConfig(rank=4)
    assert demo.tasks.source == "builtin:arithmetic"
    over = {"model": {"name": "some/model", "lora": {"rank": 8, "alpha": 2}}}
    merged = read_arguments(over, model={"lora": {"rank": 4}}, sections={}).config
    assert merged.model.name == "some/model"
    assert merged.model.lora == LoraConfig(rank=4, alpha=2)
    assert read_arguments(None, model={"name": "x"}, sections={}).config.tasks != demo.tasks
