"""Who goes first, in processes of their own: what a test does to its niceness it could not always undo."""

import json
import os
import subprocess
import sys

import pytest

REPORT = """
import json, os, threading
from pathlib import Path
from penstock.worker.priority import RaisedPriority

def niceness():
    threads = sorted({os.getpriority(os.PRIO_PROCESS, int(name)) for name in os.listdir("/proc/self/task")})
    group = Path("/proc/self/autogroup")
    return threads, int(group.read_text().split()[-1]) if group.exists() and group.read_text().strip() else None

os.setpriority(os.PRIO_PROCESS, 0, START)
first = RaisedPriority()
over = threading.Event()
threading.Thread(target=over.wait).start()  # it inherits what its maker has
print(json.dumps(niceness()))
first.end()
print(json.dumps(niceness()))
over.set()
"""


def niceness_while_and_after(start: int) -> list[tuple[list[int], int | None]]:
    """Of the threads, and of the session where Linux knows that."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT.replace("START", str(start))],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="needs Linux and root")
def test_it_goes_first_with_all_its_threads_until_it_has_started() -> None:
    (first, first_group), (after, after_group) = niceness_while_and_after(0)
    assert (first, after) == ([-10], [0])
    assert (first_group, after_group) in ((-10, 0), (None, None))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_a_run_that_was_put_behind_others_stays_there() -> None:
    assert [threads for threads, _ in niceness_while_and_after(19)] == [[19], [19]]
