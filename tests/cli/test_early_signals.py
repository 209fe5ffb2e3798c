import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.cli.early_signals import Stopped, stopping_on_signals

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_block_with_a_sentence(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(Stopped, match=r"^ended by hand$"), stopping_on_signals("ended by hand"):
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_on_signals(""):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_leave_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with stopping_on_signals(""):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


SIGNALLED = """
import os, signal, time

def rows():
    os.kill(os.getpid(), signal.{name})
    time.sleep(60)  # a signal that nobody answers ends the process before
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_reads_its_tasks_ends_with_a_sentence(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "source.py").write_text(SIGNALLED.format(name=number.name))
    # Whoever starts the tests in the background may have interrupts ignored, and with nohup SIGHUP.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    code += "from penstock.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "tasks.source=source.py:rows"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stderr) == (130, "error: stopped; no model was saved\n")
    assert not (tmp_path / "runs").exists()


SIGNALLED_AT_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.{name})

sys.meta_path.insert(0, Finder())
from penstock.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("module", ["typer", "penstock.cli.samples"])
def test_a_command_that_is_still_importing_ends_with_a_sentence(module: str, number: signal.Signals) -> None:
    code = SIGNALLED_AT_IMPORT.format(module=module, name=number.name)
    done = subprocess.run(
        [sys.executable, "-c", code, "samples", "a-run"],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: stopped\n")
