import os
import subprocess
import sys

from penstock.bench.chaos.processes_of import workers_of


def test_only_workers_of_this_controller_are_found_by_their_name() -> None:
    program = [sys.executable, "-c", "input()", "-m", "penstock.worker", "--name", "engine7"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as worker:
        assert workers_of(os.getpid()) == {"engine7": worker.pid}
        assert workers_of(worker.pid) == {}
        worker.kill()
