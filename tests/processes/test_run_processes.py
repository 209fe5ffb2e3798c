import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.processes.run_processes import processes_of_run, stacks_of, wait_for_orphans

pytestmark = pytest.mark.processes

CODE = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1, all_threads=True)

def waits_for_ever():
    print("ready", flush=True)
    sys.stdin.read()

waits_for_ever()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that looks like a worker of a run, and stands still."""
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "engine7.log"
    with log.open("ab") as output:
        program = [sys.executable, "-c", CODE, "penstock.worker"]
        process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=output, stderr=output)
    while b"ready" not in log.read_bytes():
        assert process.poll() is None
    with process:
        yield process
        process.kill()


def test_a_worker_is_found_by_its_log_and_says_where_it_stands(
    tmp_path: Path, worker: "subprocess.Popen[bytes]"
) -> None:
    (found,) = processes_of_run(tmp_path)
    assert (found.name, found.pid, found.state) == ("engine7", worker.pid, "waits")
    assert "in waits_for_ever" in stacks_of(found)
    assert processes_of_run(tmp_path / "logs") == []


def test_a_stopped_worker_is_told_and_nobody_waits_for_its_stacks(
    tmp_path: Path, worker: "subprocess.Popen[bytes]"
) -> None:
    worker.send_signal(signal.SIGSTOP)
    while processes_of_run(tmp_path)[0].state != "is stopped (SIGSTOP)":
        pass
    assert stacks_of(processes_of_run(tmp_path)[0]) == ""


def test_orphans_are_waited_for_and_named_when_they_stay(
    tmp_path: Path, worker: "subprocess.Popen[bytes]"
) -> None:
    with pytest.raises(UserError, match=rf"are still there: engine7 \(pid {worker.pid}, waits\); end them"):
        wait_for_orphans(tmp_path, 0.0)
    assert worker.stdin is not None
    worker.stdin.close()
    wait_for_orphans(tmp_path)
    assert processes_of_run(tmp_path) == []
