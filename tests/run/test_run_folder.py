import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from penstock.algorithms.catalogue import describe
from penstock.algorithms.registry import Description
from penstock.checksums import write_checksums
from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.durability.checkpoints import Progress, read_progress, write_beginning
from penstock.durability.kept_checkpoints import keep_reward
from penstock.durability.run_facts import RunFacts, write_facts
from penstock.errors import ConfigError, UserError
from penstock.loop.history import HistoryState
from penstock.records import Task
from penstock.run import run_folder
from penstock.run.preflight import new_run_folder
from penstock.run.run_folder import held, load_saved_run, write_config
from penstock.tasks.stream import StreamState, TaskStream

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
        for name in ("trainer/state.json", "trainer/tensors-0.safetensors", "model/config.json"):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(f"{name} of step {step}")
        write_checksums(path)
    return run


FILES = (
    "progress.json",
    "checksums.json",
    "trainer/state.json",
    "trainer/tensors-0.safetensors",
    "model/config.json",
)


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_run_goes_back_behind_a_damaged_checkpoint(
    tmp_path: Path, name: str, harm: Callable[[Path], Any]
) -> None:
    run = make_run(tmp_path)
    harm(run / "checkpoints" / "step-4" / name)
    saved = load_saved_run(run, [AGAIN])[1]
    assert saved.progress.step == 2
    (word,) = saved.words
    assert str(run / "checkpoints" / "step-4") in word
    assert name == "checksums.json" or name in word
    assert word.endswith("; the run goes back to the checkpoint before step-4")
    with pytest.raises(UserError, match="step-4"):
        load_saved_run(run, [AGAIN], 4)


def test_a_run_goes_back_behind_a_checkpoint_whose_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    bad, is_file = run / "checkpoints" / "step-4" / "trainer" / "state.json", Path.is_file

    def failing(path: Path) -> bool:
        if path == bad:
            raise OSError(5, "Input/output error", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", failing)
    saved = load_saved_run(run, [AGAIN])[1]
    assert saved.progress.step == 2
    assert saved.words == (
        f"[Errno 5] Input/output error: '{bad}'; the run goes back to the checkpoint before step-4",
    )


def test_with_no_whole_checkpoint_nothing_is_guessed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (2, 4):
        flip(run / "checkpoints" / f"step-{step}" / "trainer" / "state.json")
    with pytest.raises(
        UserError,
        match=r"no checkpoint of .*run is as it was written: .*step-4/trainer/state.json is damaged: .* --step 0",
    ):
        load_saved_run(run, [AGAIN])
    write_beginning(run, TaskStream([Task(id="a", prompt="a")]), 3, ())
    assert load_saved_run(run, [AGAIN], 0)[1].checkpoint is None
    flip(run / "beginning" / "progress.json")
    with pytest.raises(UserError, match=r"beginning/progress.json is damaged"):
        load_saved_run(run, [AGAIN], 0)


def test_parts_of_another_checkpoint_are_found(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", checkpoints=(2, 4, 6))
    found = run / "checkpoints"
    shutil.rmtree(found / "step-6")
    shutil.copytree(found / "step-2", found / "step-6")
    (found / "step-4" / "trainer" / "tensors-1.safetensors").touch()
    saved = load_saved_run(run, [AGAIN])[1]
    assert saved.progress.step == 2
    assert "step-6 is the checkpoint of step 2 under another name" in saved.words[0]
    assert "trainer/tensors-1.safetensors is not one of the files that were written" in saved.words[1]
    (found / "step-4" / "trainer" / "tensors-1.safetensors").unlink()
    shutil.copy(found / "step-2" / "trainer" / "tensors-0.safetensors", found / "step-4" / "trainer")
    assert "step-4/trainer/tensors-0.safetensors is damaged" in load_saved_run(run, [AGAIN])[1].words[1]


def test_a_checkpoint_of_another_run_is_found_and_one_of_a_copied_run_is_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", run="one")
    write_facts(run, RunFacts(id="one"))
    shutil.copytree(run, tmp_path / "copy")
    assert load_saved_run(tmp_path / "copy", [AGAIN])[1].progress.step == 4
    write_facts(run, RunFacts(id="other"))
    with pytest.raises(UserError, match="step-4 is a checkpoint of another run"):
        load_saved_run(run, [AGAIN], 4)


def test_a_step_below_zero_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoints=(4,))
    path = run / "checkpoints" / "step-4" / "progress.json"
    path.write_text(path.read_text().replace('"step":4', '"step":-3'))
    with pytest.raises(UserError, match=r"progress.json is damaged: Expected `int` >= 0"):
        read_progress(path.parent)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda text: "", "config.yaml is empty, which would be a run with default settings"),
        (
            lambda text: text[: len(text) // 2],
            "config.yaml is not as Penstock wrote it: it is damaged or was edited",
        ),
        (lambda text: text.replace("steps: 6", "steps: 60"), "it is damaged or was edited"),
        (lambda text: text.rpartition("#")[0], r"let its last line be: # checksum: [0-9a-f]{8}$"),
    ],
)
def test_a_config_that_is_not_whole_is_refused(
    tmp_path: Path, harm: Callable[[str], str], sentence: str
) -> None:
    run = make_run(tmp_path)
    path = run / "config.yaml"
    path.write_text(harm(path.read_text()))
    with pytest.raises(UserError, match=sentence):
        load_saved_run(run, [AGAIN])


def test_a_config_that_was_edited_on_purpose_counts_with_the_line_that_is_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("steps: 6", "steps: 60"))
    with pytest.raises(UserError) as refused:
        load_saved_run(run, [AGAIN])
    wanted = str(refused.value).rpartition("be: ")[2]
    lines = path.read_text().splitlines()
    path.write_bytes("\r\n".join([*lines[:-1], wanted]).encode())
    assert load_saved_run(run, [AGAIN])[0].run.steps == 60


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
        "engine": {
            "kind": "mine.py:of_token",
            "settings": {"mine.py:of_token": {"size": 3, "api_key": "s3cret"}},
        },
    }
    run = make_run(tmp_path, sections=sections)
    assert "s3cret" not in (run / "config.yaml").read_text()
    again = "engine.settings={'mine.py:of_token': {size: 3, api_key: again}}"
    config, _ = load_saved_run(run, [again])
    assert config.launcher.resources == {"trainer": {"our_token": 1.0}}


def test_a_secret_of_a_users_own_launcher_is_hidden(tmp_path: Path) -> None:
    launcher = {"kind": "mine.py:OWN", "settings": {"password": 481516}}
    run = make_run(tmp_path, sections={"launcher": launcher})
    assert "481516" not in (run / "config.yaml").read_text()


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
    config, _ = load_saved_run(run, [AGAIN])
    assert config.sync.transport == "auto"
    section = config.sync.model_copy(update={"transport": "cuda_ipc"})
    write_config(run, config.model_copy(update={"sync": section}))
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
        ({"checkpoints": ()}, [], "has no checkpoint to resume from"),
        ({}, ["run.steps=4"], "has done its 4 steps; set more to continue: run.steps=104"),
        ({"only_in_python": ("reward",)}, [], "was given its reward as a Python object"),
    ],
)
def test_a_run_that_can_not_go_on_says_why(
    tmp_path: Path, made: dict[str, Any], words: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        load_saved_run(make_run(tmp_path, **made), [*words, AGAIN])


def test_two_can_not_write_into_one_folder(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(UserError, match="still running"), held(tmp_path):
        pass
    with held(tmp_path):
        pass
