import os
from pathlib import Path

import pytest

from penstock.cores import usable_cores

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
