import subprocess
import sys
from pathlib import Path

from penstock.engines.vllm.leftovers import MARK, end_leftovers, marked


def test_processes_with_the_mark_are_found_and_ended() -> None:
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(100)"]
    environ = {"PATH": "/usr/bin"}
    children = [
        subprocess.Popen(command, env={**environ, MARK: mark}, stdout=subprocess.PIPE)
        for mark in ("this one", "another")
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # it runs, with its own environment
        assert marked("this one") == [children[0].pid]
        assert end_leftovers("this one") == 1
        assert children[0].wait() == -9
        assert children[1].poll() is None
        assert end_leftovers("this one") == 0
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_what_can_not_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    assert marked("x", tmp_path) == []
