"""Our own daemon: started with our folders, stopped on every way out, and never another one's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.processes.launchers import mps as room
from penstock.processes.launchers.mps import mps, quit_orphan
from tests.processes.launchers.fake_mps import FakeMps

pytestmark = pytest.mark.processes

WHOLE_LIFE = ["-d", "get_server_list", "quit"]


def test_a_daemon_of_our_own_lives_as_long_as_the_block(tmp_path: Path) -> None:
    fake, lines = FakeMps(tmp_path), []
    with mps(fake.environ, lines.append) as daemon:
        assert daemon is not None
        assert fake.told == WHOLE_LIFE[:2]
        environment = daemon.environment(yields=True)
        folders = [environment["CUDA_MPS_PIPE_DIRECTORY"], environment["CUDA_MPS_LOG_DIRECTORY"]]
        assert all(Path(folder).is_dir() and len(folder) < 60 for folder in folders)
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"
        assert environment["CUDA_MPS_CLIENT_PRIORITY"] == "1"
        assert daemon.environment()["CUDA_MPS_CLIENT_PRIORITY"] == "0"
    assert fake.calls == [[told, *folders] for told in WHOLE_LIFE]
    assert not Path(folders[0]).parent.exists()
    assert lines == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_it_quits_when_the_block_fails(tmp_path: Path, error: type[BaseException]) -> None:
    fake = FakeMps(tmp_path)
    with pytest.raises(error), mps(fake.environ, print):
        raise error
    assert fake.told == WHOLE_LIFE


def test_without_the_program_the_log_says_so_and_nothing_is_started(tmp_path: Path) -> None:
    lines: list[str] = []
    with mps({"PATH": str(tmp_path)}, lines.append) as daemon:
        assert daemon is None
    assert lines == [
        "the GPU is shared in time slices, which gains nothing over taking turns: "
        "nvidia-cuda-mps-control is not installed (it comes with NVIDIA's driver)"
    ]


def test_a_daemon_that_does_not_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    fake, lines = FakeMps(tmp_path, then='echo "no  such\ndevice"; exit 3'), []
    with mps(fake.environ, lines.append) as daemon:
        assert daemon is None
    assert fake.told == ["-d"]
    assert lines[0].endswith("nvidia-cuda-mps-control ended with exit code 3 and said: no such device")


def test_a_daemon_that_does_not_answer_is_stopped_again(tmp_path: Path) -> None:
    fake, lines = FakeMps(tmp_path, then='[ "$said" != get_server_list ]'), []
    with mps(fake.environ, lines.append) as daemon:
        assert daemon is None
    assert fake.told == WHOLE_LIFE
    assert len(lines) == 1


def test_a_daemon_that_does_not_quit_is_not_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "STOP_TIMEOUT_S", 0.2)
    fake, lines = FakeMps(tmp_path, then='[ "$said" = quit ] && exec sleep 30 || true'), []
    with mps(fake.environ, lines.append):
        pass
    assert len(lines) == 1
    assert "could not be stopped: nvidia-cuda-mps-control did not answer within 0 s" in lines[0]


def test_a_daemon_that_the_environment_names_is_used_and_left_alone(tmp_path: Path) -> None:
    fake, lines = FakeMps(tmp_path), []
    environ = {**fake.environ, "CUDA_MPS_PIPE_DIRECTORY": "/run/theirs"}
    with mps(environ, lines.append) as daemon:
        assert daemon is not None
        assert daemon.environment() == {
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100",
            "CUDA_MPS_CLIENT_PRIORITY": "0",
        }
    assert fake.calls == []
    assert lines == ["sharing the GPU through the MPS daemon of /run/theirs, which stays"]


def test_an_orphan_ends_its_controllers_daemon_and_no_other(tmp_path: Path) -> None:
    fake = FakeMps(tmp_path)
    for folder in ("penstock-abc", "theirs"):
        for name in ("pipe", "log"):
            (tmp_path / folder / name).mkdir(parents=True)
    for folder in ("theirs", "penstock-abc"):
        variables = {
            "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / folder / "log"),
        }
        process = quit_orphan({**fake.environ, **variables})
        if process is not None:
            process.wait(10)
    assert fake.calls == [
        ["quit", str(tmp_path / "penstock-abc" / "pipe"), str(tmp_path / "penstock-abc" / "log")]
    ]
    assert (tmp_path / "theirs").exists()
    assert not (tmp_path / "penstock-abc").exists()
    assert quit_orphan(os.environ) is None


def test_a_worker_of_a_killed_controller_ends_its_daemon(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, pathlib, sys\n"
        "from penstock.processes.launchers.local import LocalLauncher\n"
        "from penstock.processes.launchers.mps import mps\n"
        "async def main():\n"
        "    with mps(os.environ, print) as daemon:\n"
        "        async with LocalLauncher(pathlib.Path(sys.argv[1])) as launcher:\n"
        "            await launcher.launch('one', environment=daemon.environment())\n"
        "            print('up', flush=True)\n"
        "            await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    done = tmp_path / "done"
    os.mkfifo(done)
    fake = FakeMps(tmp_path, then=f'[ "$said" != quit ] || echo "$said" > {done}')
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(fake.environ)) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"up\n"
        controller.kill()
        assert done.read_text() == "quit\n"
    assert fake.told == WHOLE_LIFE
