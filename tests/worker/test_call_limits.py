import resource
import signal
import subprocess
import sys

import pytest

from penstock.worker.call_limits import CallLimits

SPINS = """
import sys
from penstock.worker.call_limits import CallLimits

def spin(seconds):
    import time
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

limits = CallLimits(cpu_s=1.0)
for seconds in map(float, sys.argv[1:]):
    with limits.calls(2 if seconds > 1 else 1):
        spin(seconds)
spin(1.5)
print("done")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("calls", "code"),
    [
        (["0.4", "0.4"], 0),  # each has its own second, and what is done between calls is nobody's
        (["0.1", "60"], -signal.SIGXCPU),
    ],
)
def test_a_call_past_its_cpu_time_ends_the_process(calls: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SPINS, *calls], capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    assert (done.stdout == "done\n") is (code == 0)


def test_the_limit_is_lifted_when_no_call_runs() -> None:
    before = resource.getrlimit(resource.RLIMIT_CPU)
    limits = CallLimits(cpu_s=1000.0)
    with limits.calls(3):
        soft = resource.getrlimit(resource.RLIMIT_CPU)[0]
        with limits.calls():
            assert resource.getrlimit(resource.RLIMIT_CPU)[0] - soft in (1000, 1001)
    assert resource.getrlimit(resource.RLIMIT_CPU) == (before[1], before[1])
