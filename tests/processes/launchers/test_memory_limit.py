import subprocess
import sys
from pathlib import Path

import pytest

from penstock.processes.launchers.memory_limit import (
    NAME,
    limit_memory,
    machine_bytes,
    memory_environment,
)

TAKES = """
import os
from penstock.processes.launchers.memory_limit import limit_memory
print(limit_memory(os.environ))
try:
    bytearray(5 * 10**9)
    print("taken")
except MemoryError:
    print("refused")
"""


def taken(memory_gb: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", TAKES],
        capture_output=True,
        text=True,
        env={NAME: memory_gb, "PYTHONPATH": "."},
    )
    return done.stdout.split()


@pytest.mark.processes
def test_a_process_that_wants_more_than_it_may_is_refused() -> None:
    assert taken("4.5") == ["4500000000", "refused"]
    assert taken("0")[0] == str(machine_bytes() // 2)


def test_a_container_may_have_less_than_its_machine(tmp_path: Path) -> None:
    machine = machine_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("max")
    assert machine_bytes(tmp_path) == machine
    (tmp_path / "memory.max").write_text("1000000")
    assert machine_bytes(tmp_path) == 1000000


def test_without_a_word_there_is_no_limit() -> None:
    assert limit_memory({}) is None
    assert memory_environment(0.0) == {NAME: "0.0"}
    assert memory_environment(0.0, is_on_gpu=True) == {}
    assert memory_environment(12.5, is_on_gpu=True) == {NAME: "12.5"}
