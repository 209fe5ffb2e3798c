import errno
import subprocess
import sys
from pathlib import Path

from penstock.bench.chaos.disk_quota import no_room

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
