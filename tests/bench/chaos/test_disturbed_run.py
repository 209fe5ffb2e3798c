import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.bench.chaos.disturbed_run import cut_off, no_room, workers_of

pytestmark = pytest.mark.processes

WRITER = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for line in sys.stdin:
    try:
        print(os.write(file, b"x" * int(line)), flush=True)
    except OSError as error:
        print(-error.errno, flush=True)
"""


def test_a_process_finds_no_room_past_the_limit_until_it_is_lifted(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None

        def write(num_bytes: int) -> int:
            writer.stdin.write(f"{num_bytes}\n")
            writer.stdin.flush()
            return int(writer.stdout.readline())

        assert write(10) == 10
        with no_room(writer.pid, 15):
            assert write(10) == 5
            assert write(10) == -errno.EFBIG
        assert write(10) == 10
        writer.stdin.close()


def test_only_workers_of_this_controller_are_found_by_their_name() -> None:
    program = [sys.executable, "-c", "input()", "-m", "penstock.worker", "--name", "engine7"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as worker:
        assert workers_of(os.getpid()) == {"engine7": worker.pid}
        assert workers_of(worker.pid) == {}
        worker.kill()


WORKER = """
import socket, sys
other, _ = socket.socketpair()
channel = socket.socket(socket.AF_UNIX)
channel.connect(sys.argv[1])
print("connected", flush=True)
print(channel.recv(1), flush=True)
other.send(b"still whole")
"""


def test_the_connection_to_the_controller_breaks_and_no_other(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "controller"))
        listening.listen()
        with subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path / "controller")], stdout=subprocess.PIPE, text=True
        ) as worker:
            accepted, _ = listening.accept()
            assert worker.stdout is not None
            assert worker.stdout.readline() == "connected\n"
            assert cut_off(worker.pid) == 1
            assert worker.stdout.readline() == "b''\n"
            assert accepted.recv(1) == b""
            accepted.close()
    assert worker.returncode == 0
