import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import LlavaConfig, Qwen3NextConfig

from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.durability.run_facts import read_facts
from penstock.errors import UserError
from penstock.placement.gpus import Gpu
from penstock.records import Task, Turn
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.workflow import as_workflow
from penstock.run.evaluation_session import prepare_evaluation
from penstock.run.preflight import Prepared, new_run_folder, open_writers, prepare


def prepare_on(gpu: Gpu, tiny_model: Path, folder: Path, log: list[str], **sections: Any) -> Any:
    config = build(
        PenstockConfig,
        {
            "model": {"name": str(tiny_model)},
            "reward": {"functions": ["penstock.bench.workload:reward"]},
            "rollout": {"max_new_tokens": 8},
            "run": {"folder": str(folder / "runs")},
            **sections,
        },
    )
    tasks = [Task(id="a", prompt="1+2=")]
    return prepare(config, tasks=tasks, log=log.append, cache=folder, gpus=(gpu,))


def test_the_memory_of_a_gpu_is_shared_out_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    log: list[str] = []
    gpu = Gpu(name="a GPU", total_bytes=10**10, free_bytes=10**10)
    prepared = prepare_on(gpu, tiny_model, tmp_path, log)
    assert 0.8 < prepared.memory.memory_share < 0.91
    assert log[0].startswith("auto, on a GPU: engine.dtype=bfloat16, ")
    assert log[1:] == [str(prepared.memory)]
    assert prepared.config.engine.dtype == "bfloat16"
    assert prepared.memory.kv_bytes_per_token == 2 * 2 * 2 * 32
    assert "transport: cuda_ipc" in (prepared.folder / "config.yaml").read_text()
    assert "sync.transport" in read_facts(prepared.folder).auto


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.touch(), "is a file"),
        (lambda path: path.symlink_to("gone"), "is a link to gone, which is not there"),
    ],
)
def test_a_run_folder_that_is_none_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None], sentence: str
) -> None:
    make(tmp_path / "runs")
    config = build(PenstockConfig, {"run": {"folder": str(tmp_path / "runs")}, "model": {"name": "none"}})
    with pytest.raises(UserError, match=f"^run.folder must be a folder, and .*runs {sentence}"):
        prepare(config, tasks=[Task(id="a", prompt="1+2=")], log=[].append, cache=tmp_path)
    with pytest.raises(UserError, match="^run.folder must be a folder"):
        new_run_folder(config)
    deeper = {"run": {"folder": str(tmp_path / "runs" / "deeper")}, "model": {"name": "none"}}
    with pytest.raises(UserError, match=f"^run.folder must lie in a folder, and .*runs {sentence}"):
        prepare(build(PenstockConfig, deeper), tasks=[], log=[].append, cache=tmp_path)


def test_a_vision_model_is_refused_before_there_is_a_run_folder(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    LlavaConfig().save_pretrained(folder)
    config = build(
        PenstockConfig,
        {
            "model": {"name": str(folder)},
            "reward": {"functions": ["penstock.bench.workload:reward"]},
            "run": {"folder": str(tmp_path / "runs")},
            "eval": {"tasks": {}},
        },
    )
    sentence = "^LlavaForConditionalGeneration can't be served: vision"
    with pytest.raises(UserError, match=sentence):
        prepare(config, tasks=[Task(id="a", prompt="1+2=")], log=[].append, cache=tmp_path)
    with pytest.raises(UserError, match=sentence):
        prepare_evaluation(config, folder=tmp_path, log=print, cache=tmp_path, gpus=())
    assert not (tmp_path / "runs").exists()


def test_a_gpu_that_is_not_there_stops_the_run_before_its_model_is_read(tmp_path: Path) -> None:
    gpu = Gpu(name="a GPU", total_bytes=10**10, free_bytes=10**10)
    config = build(PenstockConfig, {"model": {"name": "none", "device": "cuda:99"}})
    with pytest.raises(UserError, match=r"^model.device=cuda:99 needs more than the 1 GPU that this machine"):
        prepare(config, tasks=[Task(id="a", prompt="1+2=")], log=[].append, cache=tmp_path, gpus=(gpu,))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"model": {"name": "family"}}, "^Qwen3NextForCausalLM can't be served"),
        ({"model": {"name": "family"}, "engine": {"kind": "vllm"}}, "^Qwen3NextForCausalLM can't be served"),
        ({"engine": {"kind": "vllm"}, "rollout": {"top_p": 0.9}}, "^engine.kind=vllm lacks sampling_mask"),
        ({"engine": {"kind": "vllm"}, "sync": {"selection": "delta"}}, "^engine.kind=vllm lacks delta"),
        ({"engine": {"kind": "vllm"}, "model": {"lora": {}}}, "^sync.interrupt must be drain with"),
        (
            {"sync": {"transport": "cuda_ipc"}},
            "^sync.transport=cuda_ipc needs trainer and engines on one GPU",
        ),
        ({"engine": {"record_routing": "on"}}, "^engine.record_routing=on needs a model with experts"),
        ({"trainer": {"parallel": {"data": 4096}}}, "^trainer.parallel has 4096 ranks, and this machine can"),
    ],
)
def test_what_a_config_can_not_have_is_refused_before_tasks_are_read_and_a_folder_is_made(
    sections: dict[str, Any], sentence: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Qwen3NextConfig().save_pretrained(tmp_path / "family")
    given = {"tasks": {"source": "nowhere.jsonl"}, **sections}
    config = build(PenstockConfig, {**given, "model": {"name": str(tiny_model), **given.get("model", {})}})
    with pytest.raises(UserError, match=sentence):
        prepare(config, log=[].append, cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["family"]


def test_characters_that_the_model_does_not_see_are_named(tiny_model: Path, tmp_path: Path) -> None:
    log: list[str] = []
    sections = {"model": {"name": str(tiny_model)}, "run": {"folder": str(tmp_path)}}
    config = build(PenstockConfig, {**sections, "rollout": {"max_new_tokens": 8}})
    prepare(config, tasks=[Task(id="a", prompt="12+x=")], log=log.append, cache=tmp_path)
    assert log[0].endswith("has no token for 'x' (in 1 of 1 prompts): the model does not see them")


def test_a_transport_that_devices_do_not_allow_stops_the_run(tiny_model: Path, tmp_path: Path) -> None:
    gpu = Gpu(name="a GPU", total_bytes=10**10, free_bytes=10**10)
    with pytest.raises(UserError, match="^sync.transport=cuda_ipc needs trainer and engines on one GPU, got"):
        prepare_on(gpu, tiny_model, tmp_path, [], sync={"transport": "cuda_ipc"}, engine={"device": "cpu"})
    assert not (tmp_path / "runs").exists()


def test_trackers_know_a_run_that_goes_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []
    trackio = SimpleNamespace(init=lambda **options: opened.append(options), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    gpu = Gpu(name="a GPU", total_bytes=10**10, free_bytes=10**10)
    prepared = prepare_on(gpu, tiny_model, tmp_path, [], observe={"trackio": True})
    for _ in range(2):
        for writer in open_writers(prepared):
            writer.close()
    first, second = opened
    assert (first["resume"], second["resume"]) == ("never", "allow")
    assert first["name"] == second["name"] == read_facts(prepared.folder).trackers["trackio"]
    assert "sync.transport" in read_facts(prepared.folder).auto


def test_a_gpu_that_is_too_small_stops_the_run_before_it_has_a_folder(
    tiny_model: Path, tmp_path: Path
) -> None:
    gpu = Gpu(name="a GPU", total_bytes=10**9, free_bytes=10**9)
    with pytest.raises(UserError, match="an engine needs 1.5 GB"):
        prepare_on(gpu, tiny_model, tmp_path, [])
    assert not (tmp_path / "runs").exists()


def test_a_deterministic_run_is_refused_on_a_gpu(tiny_model: Path, tmp_path: Path) -> None:
    gpu = Gpu(name="a GPU", total_bytes=10**10, free_bytes=10**10)
    model = {"name": str(tiny_model), "device": "auto"}  # unsaid, it would be a CPU
    run = {"folder": str(tmp_path / "runs"), "deterministic": True}
    with pytest.raises(UserError, match="needs a CPU: set model.device=cpu"):
        prepare_on(gpu, tiny_model, tmp_path, [], model=model, run=run)
    assert not (tmp_path / "runs").exists()


def test_a_chat_model_is_prompted_through_its_template_with_a_word(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}")
    config = build(
        PenstockConfig,
        {
            "model": {"name": str(folder)},
            "tasks": {"template_args": {"end": "="}},
            "rollout": {"max_new_tokens": 8},
            "run": {"folder": str(tmp_path / "runs")},
        },
    )
    log: list[str] = []
    rows = [{"prompt": "1+2"}]
    prepared = prepare(config, tasks=rows, log=log.append, cache=tmp_path)
    assert prepared.tokenizer.encode_prompt(prepared.tasks[0].prompt) == [2, 11, 3, 12]
    assert log[:1] == [
        "the model has a chat template: 1 string prompts became user messages "
        "(tasks.as_chat=false leaves them as they are)"
    ]
    assert "as_chat: true" in (prepared.folder / "config.yaml").read_text()


@pytest.mark.parametrize("is_heldout", [False, True])
def test_a_command_beside_a_workflow_that_no_worker_can_load_is_refused(
    tiny_model: Path, tmp_path: Path, is_heldout: bool
) -> None:
    async def closure(task: Task, rollout: Rollout) -> Turn:
        return await rollout.generate(task.prompt)

    plain, agent = Task(id="b", prompt="1+2="), Task(id="a", prompt="1+3=", workflow="python agent.py")
    config = build(
        PenstockConfig,
        {
            "model": {"name": str(tiny_model)},
            "reward": {"functions": ["penstock.bench.workload:reward"]},
            "eval": {"tasks": {}},
            "run": {"folder": str(tmp_path / "runs")},
        },
    )
    with pytest.raises(UserError) as raised:
        prepare(
            config,
            tasks=[plain if is_heldout else agent],
            heldout=[agent if is_heldout else plain],
            log=print,
            cache=tmp_path,
            workflow=as_workflow(closure),
        )
    assert str(raised.value) == (
        "the workflow of task 'a' is a command, which needs rollout workers, and none can load the run's workflow, "
        "since it exists only in this process; put that into a module and name it by path "
        "(rollout.workflow=file.py:function)"
    )
    assert not (tmp_path / "runs").exists()


def test_a_run_folder_is_private_and_shows_no_secret(tmp_path: Path) -> None:
    config = build(
        PenstockConfig,
        {"run": {"folder": str(tmp_path)}, "tasks": {"arguments": {"token": "s3cret"}}},
    )
    folder = new_run_folder(config)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "config.yaml").stat().st_mode & 0o777 == 0o600
    text = (folder / "config.yaml").read_text()
    assert "s3cret" not in text
    assert "token: '***'" in text


PARTS = ("loss", "advantage", "correction", "kl", "selection", "reward", "workflow", "transport", "task")


def test_the_file_of_every_part_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    at = {name: tmp_path / name / f"{name}.py" for name in PARTS}
    for file in (home / "here.py", *at.values()):
        file.parent.mkdir()
        file.touch()
    monkeypatch.chdir(home)
    path = {name: f"{file}:part" for name, file in at.items()}
    config = PenstockConfig.model_validate(
        {
            "algorithm": {
                "loss": path["loss"],
                "advantage": path["advantage"],
                "corrections": {path["correction"]: {}, "here.py:part": {}, "some.module:part": {}},
                "kl_estimator": path["kl"],
                "selection": {path["selection"]: {}},
            },
            "reward": {"functions": [path["reward"], "exact_match"]},
            "rollout": {"workflow": path["workflow"]},
            "sync": {"transport": path["transport"]},
        }
    )
    prepared = Prepared(
        config=config,
        model="a/hub-name",
        tokenizer=cast(Any, None),
        tasks=[Task(id="t", prompt="p", workflow=path["task"])],
        heldout=[],
        folder=tmp_path / "runs",
        max_context=64,
    )
    shipped = {file for _, files in prepared.user_files(home).roots for file in files}
    assert shipped == {home / "here.py", *at.values()}
