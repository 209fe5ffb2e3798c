import socket
import subprocess
import sys
from pathlib import Path

from penstock.bench.chaos.connections import cut_off

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
