import asyncio
from pathlib import Path

import pytest

from penstock.engines.vllm.installed_version import too_old


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("0.25.1", "0.25.1"),
        ("0.9.2", "0.9.2"),
        ("0.32.0+cpu", ""),
        ("1.0", ""),
        ("INFO hello\n0.31.9", "0.31.9"),
    ],
)
def test_a_version_below_the_needed_one_is_named(tmp_path: Path, said: str, found: str) -> None:
    program = tmp_path / "vllm"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    assert asyncio.run(too_old(str(program))) == found


def test_a_program_that_says_nothing_is_not_called_old(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    assert asyncio.run(too_old(str(program))) == ""
