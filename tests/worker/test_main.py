"""A worker's process, by itself."""

import subprocess
import sys
from pathlib import Path


def test_an_orphan_that_finds_no_controller_says_so_in_one_line(tmp_path: Path) -> None:
    """Its controller was killed while it started; its log is what a resumed run writes on."""
    address = f"unix:{tmp_path / 'controller'}"
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.worker", "--connect", address, "--name", "trainer"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == (
        "worker trainer can't reach its controller, so it ends: [Errno 2] No such file or directory\n"
    )
