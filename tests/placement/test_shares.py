"""Threads, and who shares a GPU with whom."""

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.errors import UserError, WorkerDied
from penstock.models.tokenizer import ChatTokenizer
from penstock.observe.readers import show
from penstock.observe.status import RunStatus
from penstock.observe.views import SilentView
from penstock.placement.automatic import resolve_auto
from penstock.placement.gpus import Gpu
from penstock.placement.shares import (
    Threads,
    place_threads,
    scorer_environment,
    shares_a_gpu,
    sharing,
    usable_cores,
)
from penstock.processes.launchers.local import LocalLauncher
from penstock.records import Task
from penstock.run.preflight import Prepared
from penstock.run.run import Run
from penstock.run.workers import Workers, start_workers
from tests.processes.launchers.fake_mps import FakeMps

pytestmark = pytest.mark.processes

GPU = Gpu(name="a GPU", total_bytes=140 << 30, free_bytes=139 << 30)
TOLD = ["-d", "get_server_list", "quit"]


def config_of(**sections: Any) -> PenstockConfig:
    return build(PenstockConfig, sections)


def test_threads_are_shared_out() -> None:
    assert place_threads(cores=8, num_engines=2, max_staleness=4) == Threads(engine=2, trainer=4)
    assert place_threads(cores=8, num_engines=2, max_staleness=0) == Threads(engine=4, trainer=8)
    assert place_threads(cores=8, num_engines=1, max_staleness=4, engine=3) == Threads(engine=3, trainer=4)


@pytest.mark.parametrize(
    ("model", "engine", "num_gpus", "shared"),
    [
        ("auto", "auto", 1, True),
        ("auto", "auto", 0, False),
        ("cpu", "auto", 1, False),
        ("cuda", "cuda:0", 2, True),
        ("cuda:1", "auto", 2, True),
        ("cuda:1", "cuda:0", 2, False),
        ("auto", "cpu", 1, False),
        ("cuda:3", "cuda:3", 2, False),
    ],
)
def test_who_shares_a_gpu(model: str, engine: str, num_gpus: int, shared: bool) -> None:
    config = config_of(model={"device": model}, engine={"device": engine})
    assert shares_a_gpu(config, (GPU,) * num_gpus) is shared


def test_precedence_reaches_the_environments(tmp_path: Path) -> None:
    fake, lines = FakeMps(tmp_path), []
    config = config_of(placement={"first": "engine"})
    with sharing(config, (GPU,), fake.environ, lines.append) as environments:
        for environment, percent, priority in (
            (environments.engine, "100", "0"),
            (environments.trainer, "100", "1"),
        ):
            assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percent
            assert environment["CUDA_MPS_CLIENT_PRIORITY"] == priority
            assert [environment["CUDA_MPS_PIPE_DIRECTORY"], environment["CUDA_MPS_LOG_DIRECTORY"]] == (
                fake.calls[0][1:]
            )
    assert fake.told == TOLD
    assert lines == []


@pytest.mark.parametrize(
    ("sections", "gpus", "line"),
    [
        ({"placement": {"share": "time"}}, (GPU,), None),
        ({"staleness": {"max_staleness": 0}}, (GPU,), None),
        ({}, (), None),
        (
            {"placement": {"share": "mps"}},
            (),
            "placement.share=mps changes nothing: trainer and engines have no GPU in common",
        ),
    ],
)
def test_no_daemon_where_none_helps(
    tmp_path: Path, sections: dict[str, Any], gpus: tuple[Gpu, ...], line: str | None
) -> None:
    fake, lines = FakeMps(tmp_path), []
    with sharing(config_of(**sections), gpus, fake.environ, lines.append) as environments:
        assert (environments.engine, environments.trainer) == ({}, {})
    assert fake.calls == []
    assert lines == ([] if line is None else [line])


def test_without_the_program_workers_take_turns(tmp_path: Path) -> None:
    lines: list[str] = []
    with sharing(config_of(), (GPU,), {"PATH": str(tmp_path)}, lines.append) as environments:
        assert (environments.engine, environments.trainer) == ({}, {})
    assert len(lines) == 1
    assert lines[0].startswith("the GPU is shared in time slices")


@pytest.fixture
def prepared(tmp_path: Path, tiny_model: Path) -> Prepared:
    """A run whose controller believes in a GPU that the workers, on this CPU, do not find."""
    config = config_of(
        model={"name": str(tiny_model)},
        reward={"functions": ["penstock.bench.workload:reward"]},
        rollout={"max_new_tokens": 4, "groups_per_step": 1, "group_size": 2},
        run={"steps": 1},
    )
    return Prepared(
        config=resolve_auto(config).config,
        model=str(tiny_model),
        tokenizer=ChatTokenizer(str(tiny_model)),
        tasks=[Task(id=str(number), prompt=f"{number}+1=") for number in range(4)],
        heldout=[],
        folder=tmp_path,
        max_context=64,
        gpus=(GPU,),
    )


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    """A daemon's program on the PATH of the session itself."""
    fake = FakeMps(tmp_path)
    monkeypatch.setenv("PATH", fake.environ["PATH"])
    return fake


@pytest.mark.full
def test_both_workers_are_clients_of_the_runs_daemon(prepared: Prepared, fake: FakeMps) -> None:
    async def main() -> dict[str, dict[str, str]]:
        with sharing(prepared.config, prepared.gpus, os.environ, print) as environments:
            async with LocalLauncher(prepared.folder / "logs") as launcher:
                workers: Workers = await start_workers(launcher, prepared, environments)
                places = [*workers.trainer.place.members, *(engine.place for engine in workers.engines)]
                return {
                    place.name: psutil.Process(place._worker.pid).environ()  # type: ignore[union-attr]
                    for place in places
                }

    found = asyncio.run(main())
    assert {name: each["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for name, each in found.items()} == {
        "trainer": "100",
        "engine0": "100",
    }
    assert {each["CUDA_MPS_PIPE_DIRECTORY"] for each in found.values()} == {fake.calls[0][1]}
    assert fake.told == TOLD


@pytest.mark.full
def test_a_run_that_ends_stops_its_daemon(prepared: Prepared, fake: FakeMps) -> None:
    summary = asyncio.run(Run(prepared, show(SilentView())).run())
    assert summary.steps == 1
    assert fake.told == TOLD


def test_a_run_that_is_stopped_at_once_stops_its_daemon(prepared: Prepared, fake: FakeMps) -> None:
    """The second Ctrl-C cancels the task that the session runs in."""

    class Impatient(SilentView):
        def update(self, status: RunStatus) -> None:
            if status.phase == "verifying weights" and not running.cancelling():
                running.cancel()

    async def main() -> None:
        nonlocal running
        running = asyncio.create_task(Run(prepared, show(Impatient())).run())
        await running

    running: asyncio.Task[Any]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert fake.told == TOLD


@pytest.mark.full
def test_a_run_whose_worker_dies_stops_its_daemon(prepared: Prepared, fake: FakeMps) -> None:
    class Killer(SilentView):
        def update(self, status: RunStatus) -> None:
            for child in psutil.Process().children(recursive=True):
                if "trainer" in child.cmdline():
                    child.kill()

    with pytest.raises(WorkerDied, match="worker trainer"):
        asyncio.run(Run(prepared, show(Killer())).run())
    assert fake.told == TOLD


@pytest.mark.parametrize(
    ("device", "visible", "environment"),
    [
        ("cpu", None, {}),
        ("cuda", None, {"CUDA_VISIBLE_DEVICES": "0"}),
        ("cuda:1", None, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("cuda:1", "GPU-a, GPU-b", {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
    ],
)
def test_a_scoring_worker_sees_its_gpu_alone(
    device: str, visible: str | None, environment: dict[str, str]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    gpus = [Gpu(name="a GPU", total_bytes=1, free_bytes=1)] * 2
    assert scorer_environment(device, gpus, environ) == environment


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="reward.device is cuda:2, and 0 GPUs can be seen here; use cpu"):
        scorer_environment("cuda:2", [], {})


NOWHERE = Path("/nowhere")


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000", 2), ("150000 100000", 2), ("max 100000", 8), ("", 8), ("1 100000", 1), ("7 0", 8)],
)
def test_a_containers_share_counts(
    text: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path / "cpu.max") == cores


def test_only_cores_that_the_process_may_run_on_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert usable_cores(NOWHERE) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores(NOWHERE) == 64
