import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from penstock.algorithms.catalogue import describe
from penstock.algorithms.registry import Description
from penstock.buffer.history import HistoryState
from penstock.config.loader import build
from penstock.errors import ConfigError, UserError
from penstock.orchestration import run_folder
from penstock.orchestration.checkpoints import Progress, write_beginning
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.kept_checkpoints import keep_reward
from penstock.orchestration.preflight import new_run_folder
from penstock.orchestration.run_facts import RunFacts, write_facts
from penstock.orchestration.run_folder import held, load_saved_run, put_aside_rows_past
from penstock.tasks.stream import StreamState, TaskStream
from penstock.types import Task

ARGUMENTS = {"arguments": {"token": "secret-1"}}


def make_run(
    folder: Path,
    *,
    checkpoints: tuple[int, ...] = (2, 4),
    sections: Mapping[str, Any] = MappingProxyType({"tasks": ARGUMENTS}),
    **changes: Any,
) -> Path:
    config = build(PenstockConfig, {"run": {"folder": str(folder), "steps": 6}, **sections})
    run = new_run_folder(config)
    for step in checkpoints:
        path = run / "checkpoints" / f"step-{step}"
        path.mkdir(parents=True)
        progress = Progress(
            step=step,
            max_staleness=1,
            num_admitted=8,
            history=HistoryState(policy="policy", steps=(0,)),
            tasks=StreamState(epoch=0, position=0, returned=(), checksum=0),
            **changes,
        )
        (path / "progress.json").write_bytes(msgspec.json.encode(progress))
    return run


AGAIN = "tasks.arguments.token=again"


def test_a_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    config, saved = load_saved_run(run, ["run.steps=8", AGAIN])
    assert (config.run.steps, saved.progress.step, saved.checkpoint.name) == (8, 4, "step-4")
    assert config.tasks.arguments == {"token": "again"}


def algorithms_of(entry: Description) -> list[dict[str, Any]]:
    """The `algorithm` section in every way that it can name this function."""
    settings = {key: value for key, value in entry.parameters.items() if value is not None}
    match entry.kind:
        case "advantage" | "loss":
            return [{entry.kind: entry.name, f"{entry.kind}_args": settings}]
        case "correction":
            return [{"corrections": {entry.name: settings}}, {"engine_corrections": {entry.name: settings}}]
        case "selection":
            return [{"selection": {entry.name: settings}}]
    assert entry.kind == "kl_estimator", "a new kind belongs in this test"
    return [{"kl_estimator": entry.name}]


OF_USERS: list[dict[str, Any]] = [
    {"corrections": {"mine.py:my_token": {"cap": 2.0, "per_token": True, "mode": "soft"}}},
    {"engine_corrections": {"package.module:my_token": {}}},
    {"selection": {"mine.py:by_token": {"max_token": 3}}},
    {"advantage": "mine.py:each_token", "advantage_args": {"first_token": 2}},
    {"loss": "mine.py:my_token", "loss_args": {"token": 0.5}},
]


@pytest.mark.parametrize(
    "algorithm", [*(one for entry in describe() for one in algorithms_of(entry)), *OF_USERS], ids=str
)
def test_a_run_of_any_algorithm_is_resumed_with_its_settings(
    tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    config, _ = load_saved_run(make_run(tmp_path, sections={"algorithm": algorithm}), [])
    assert config.algorithm == build(PenstockConfig, {"algorithm": algorithm}).algorithm


def test_names_of_engines_and_resources_are_no_secrets(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "launcher": {"resources": {"trainer": {"our_token": 1.0}}},
        "engine": {"settings": {"mine.py:of_token": {"size": 3, "api_key": "s3cret"}}},
    }
    run = make_run(tmp_path, sections=sections)
    assert "s3cret" not in (run / "config.yaml").read_text()
    again = "engine.settings={'mine.py:of_token': {size: 3, api_key: again}}"
    config, _ = load_saved_run(run, [again])
    assert config.launcher.resources == {"trainer": {"our_token": 1.0}}


def test_a_secret_of_a_users_own_function_is_hidden(tmp_path: Path) -> None:
    selection = {"mine.py:judged": {"api_key": "s3cret", "limit": 3}}
    run = make_run(tmp_path, sections={"algorithm": {"selection": selection}})
    assert "s3cret" not in (run / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"algorithm\.selection\.mine\.py:judged\.api_key is hidden"):
        load_saved_run(run, [])


def test_the_checkpoint_that_an_orphan_still_names_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer of a killed controller may end a moment later, and name the checkpoint that it was writing."""
    run = make_run(tmp_path, checkpoints=(2, 4))
    unnamed = (run / "checkpoints" / "step-4").rename(run / "checkpoints" / ".step-4.x")
    monkeypatch.setattr(
        run_folder, "wait_for_orphans", lambda folder: unnamed.rename(folder / "checkpoints" / "step-4")
    )
    assert load_saved_run(run, [AGAIN])[1].progress.step == 4


def test_a_run_goes_back_to_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert load_saved_run(run, [AGAIN], 2)[1].checkpoint == run / "checkpoints" / "step-2"
    with pytest.raises(UserError, match="has no checkpoint of step 3; it has checkpoints of steps: 2, 4"):
        load_saved_run(run, [AGAIN], 3)
    with pytest.raises(UserError, match="has no checkpoint that was evaluated"):
        load_saved_run(run, [AGAIN], "best")
    keep_reward(run / "checkpoints" / "step-2", 0.7)
    keep_reward(run / "checkpoints" / "step-4", 0.6)
    assert load_saved_run(run, [AGAIN], "best")[1].progress.step == 2
    write_beginning(run, TaskStream([Task(id="a", prompt="a")]), 3, ())
    assert load_saved_run(run, [AGAIN], 0)[1].checkpoint is None


def test_before_its_first_checkpoint_a_run_goes_on_from_its_beginning(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoints=())
    tasks = TaskStream([Task(id="a", prompt="a")])
    write_beginning(run, tasks, 3, ())
    _, saved = load_saved_run(run, [AGAIN])
    assert (saved.checkpoint, saved.progress.step, saved.progress.history.steps) == (None, 0, ())
    tasks.restore(saved.progress.tasks)
    assert saved.progress.max_staleness == 3
    assert saved.rows_until == -1
    write_beginning(run, tasks, 3, ("reward",))
    with pytest.raises(UserError, match="was given its reward as a Python object"):
        load_saved_run(run, [AGAIN])


def test_what_auto_chose_is_chosen_again_unless_it_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("transport: auto", "transport: cuda_ipc"))
    config, _ = load_saved_run(run, [AGAIN])
    assert config.sync.transport == "cuda_ipc"
    write_facts(run, RunFacts(auto=("sync.transport", "trainer.dtype")))
    config, _ = load_saved_run(run, [AGAIN, "trainer.dtype=float32"])
    assert (config.sync.transport, config.trainer.dtype) == ("auto", "float32")


def test_hidden_secrets_must_be_given_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks.arguments.token is hidden .* give it again"):
        load_saved_run(make_run(tmp_path), [])


def test_what_a_run_can_not_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.name can't be changed"):
        load_saved_run(make_run(tmp_path), ["model.name=other", AGAIN])
    with pytest.raises(UserError, match=r"model\.lora\.rank can't be changed"):
        load_saved_run(tmp_path / "run", ["model.lora.rank=4", AGAIN])


@pytest.mark.parametrize(
    ("made", "words", "sentence"),
    [
        ({"checkpoints": ()}, [], "has no checkpoint to go on from"),
        ({}, ["run.steps=4"], "has done its 4 steps; give more to go on: run.steps=104"),
        ({"only_in_python": ("reward",)}, [], "was given its reward as a Python object"),
    ],
)
def test_a_run_that_can_not_go_on_says_why(
    tmp_path: Path, made: dict[str, Any], words: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        load_saved_run(make_run(tmp_path, **made), [*words, AGAIN])


def test_two_can_not_write_into_one_folder(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(UserError, match="still going on"), held(tmp_path):
        pass
    with held(tmp_path):
        pass


def test_rows_past_the_checkpoint_are_put_aside(tmp_path: Path) -> None:
    rows = [json.dumps({"step": step, "loss": 0.5}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 4, "lo')
    put_aside_rows_past(tmp_path, 2)
    put_aside_rows_past(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == rows[:2]
    assert (tmp_path / "metrics.undone.jsonl").read_text().splitlines() == [rows[2], '{"step": 4, "lo']
