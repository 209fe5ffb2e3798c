"""A whole run on servers of its own, which are killed: it goes on, and leaves nothing behind."""

import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.engines.vllm.fake_program import fake_vllm
from tests.test_end_to_end import nothing_goes_on, project, start_endless  # noqa: F401  (fixtures)

pytestmark = pytest.mark.processes


def servers(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "--uds" in child.cmdline()]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_killed_server_is_replaced_and_the_run_goes_on(project: Path, tmp_path: Path) -> None:  # noqa: F811
    process = start_endless(
        project, "engine.kind=vllm", f"engine.vllm.command={fake_vllm(tmp_path)}", "engine.max_context=64"
    )
    (server,) = servers(process.pid)
    server.kill()
    assert process.stdout is not None
    assert any(  # whoever needs it first says so: a request, or an update, which may not know whether it was loaded
        "engine0 is lost, its requests begin again elsewhere or wait for it" in line
        or ("did not reach every engine, trying again in 1 s: " in line and "can't reach its vLLM" in line)
        for line in process.stdout
    )
    steps = (int(found[1]) for line in process.stdout if (found := re.search(r" step (\d+)/", line)))
    before = next(steps)
    assert any(step > before + 5 for step in steps)  # more than what was ready before the server was killed
    (replacement,) = servers(process.pid)
    assert replacement.pid != server.pid
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert not replacement.is_running() or replacement.status() == psutil.STATUS_ZOMBIE
