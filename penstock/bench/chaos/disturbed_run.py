"""Runs the demo in separate processes and disturbs it. Killed controllers are resumed by `penstock resume`."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from penstock.bench.chaos.faults import CONTROLLER, Fault
from penstock.bench.chaos.noted_turns import NOTES, count_again, json_lines
from penstock.bench.chaos.run_audit import complaints_of
from penstock.durability.durable_log import FOLDER
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.errors import PenstockError
from penstock.observe.writers.recoveries_jsonl import read_recoveries
from penstock.run.run_folder import METRICS

PENSTOCK = [sys.executable, "-c", "from penstock.cli import main; main()"]
SETTINGS = (
    "run.checkpoint_every=5",
    "run.freeze_s=10",
    "run.start_s=120",
    "run.restarts=1000",
    "reward.timeout_s=5",
    "observe.view=plain",
    "rollout.workflow=penstock.bench.chaos.noted_turns:answer",
    "rollout.workers=1",
)
TRAINS = b" training\n"
"""The end of the line that a run prints when it begins to train."""
GROUPS_PER_STEP = 16
"""The demo's value."""
MORE_STEPS = 40
"""Further steps for a run that has done all of its steps and is still to be disturbed."""
WITHOUT_ROOM_S = 6.0
"""How long the disk is full: longer than a journal waits before its next try."""
LOOK_AGAIN_S = 0.1
TIMEOUT_S = 600.0
"""How long a run may take to begin training, or a worker to be replaced."""


class DisturbedRun:
    def __init__(self, folder: Path, *, steps: int, seed: int) -> None:
        self.run = folder / "chaos"
        self.steps = steps
        self._output = folder / "chaos.txt"
        self._notes = folder / "turns.jsonl"
        own = (f"run.folder={folder}", "run.name=chaos", f"run.steps={steps}", f"run.seed={seed}")
        self._command = ["train", *SETTINGS, *own]
        self._process: subprocess.Popen[bytes] | None = None
        self._missing: dict[str, int] = {}
        """Workers that a fault has hit, with how often they had recovered before."""
        self.complaints: list[str] = []
        """What the audits after each kill of the controller found, and the errors with which the run ended by
        itself."""

    def begin(self) -> None:
        """Start or resume the run, and wait until it trains and has a checkpoint. A run that was killed after
        its last step gets further steps."""
        if max(checkpoints_of(self.run), default=0) >= self.steps:
            self.steps += MORE_STEPS
            self._command = ["resume", str(self.run), f"run.steps={self.steps}"]
        before = self._times_begun()
        environment = {**os.environ, NOTES: str(self._notes.resolve())}
        # Through a pipe: a limit on the size of files must not stop the output.
        self._process = subprocess.Popen(
            [*PENSTOCK, *self._command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        self._missing.clear()
        assert self._process.stdout is not None
        self._copying = threading.Thread(target=_copy, args=(self._process.stdout, self._output), daemon=True)
        self._copying.start()
        self._command = ["resume", str(self.run)]
        self._wait(lambda: bool(checkpoints_of(self.run)) and self._times_begun() > before)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def note_end(self) -> None:
        """Record a complaint if the run ended by itself with an error."""
        assert self._process is not None
        code = self._process.wait()
        self._copying.join()
        if code != 0:
            said = self._output.read_text(errors="replace").strip().splitlines()
            self.complaints.append(f"the run ended by itself: {said[-1] if said else f'with code {code}'}")

    def apply(self, fault: Fault, num_bytes: int = 0, *, wait: bool = True) -> bool:
        """Apply a fault. With `wait`, wait until the run has recovered; otherwise the next fault may come
        before. Return False if the fault could not be applied, because its process is not running."""
        assert self._process is not None
        if fault.what == "fill the disk of":
            return self._fill_disk(num_bytes)
        if fault.whom == CONTROLLER:
            self.kill()
            if fault.what == "kill and tear":
                self._tear(num_bytes)
            return True
        victim = workers_of(self._process.pid).get(fault.whom)
        if victim is None or self._is_missing(fault.whom):
            return False
        self._missing[fault.whom] = self._num_recoveries(fault.whom)
        if fault.what == "cut off":
            cut_off(victim)
        else:
            os.kill(victim, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
        if wait:
            self._wait(lambda: not self._is_missing(fault.whom))
        return True

    def end(self) -> None:
        """Wait for the last step, resuming the run if it ends before."""
        for _ in range(3):
            if not self.is_running:
                self.begin()
            while self.is_running:
                self._wait_for_step()
            assert self._process is not None
            if self._process.wait() == 0:
                return
            self.note_end()

    def kill(self) -> None:
        """Kill the controller if it runs, and audit what that leaves."""
        if self.is_running and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._copying.join()
            self.complaints += self.audit(None)

    def audit(self, steps: int | None) -> list[str]:
        """Audit the files of the run while no process writes to them."""
        return complaints_of(self.run, steps=steps, groups_per_step=GROUPS_PER_STEP)

    def regenerated_fraction(self) -> float:
        again, sampled = count_again(json_lines(self._notes))
        return again / max(1, sampled)

    def _times_begun(self) -> int:
        """Return how often the run has printed that it trains."""
        return self._output.read_bytes().count(TRAINS) if self._output.exists() else 0

    def _is_missing(self, name: str) -> bool:
        """Return whether a fault has hit the worker and it has not been replaced yet."""
        return name in self._missing and self._num_recoveries(name) <= self._missing[name]

    def _fill_disk(self, num_bytes: int) -> bool:
        """Let the journal grow by so many bytes, then leave no room for some seconds. New processes would
        inherit this limit, so missing workers are waited for first."""
        assert self._process is not None
        self._wait(lambda: not any(map(self._is_missing, self._missing)))
        segments = self._segments()
        if not self.is_running or not segments:
            return False
        with no_room(self._process.pid, segments[-1].stat().st_size + num_bytes):
            time.sleep(WITHOUT_ROOM_S)
        self._wait_for_step()
        return True

    def _wait_for_step(self) -> None:
        before = self._metrics_bytes()
        self._wait(lambda: self._metrics_bytes() > before)

    def _metrics_bytes(self) -> int:
        """Return the size of the run's metrics, which grow with every step."""
        path = self.run / METRICS
        return path.stat().st_size if path.exists() else 0

    def _num_recoveries(self, name: str) -> int:
        return sum(event.worker == name for event in read_recoveries(self.run))

    def _tear(self, num_bytes: int) -> None:
        """Cut the last bytes of the newest segment, as a power loss does with bytes that were not synced."""
        segments = self._segments()
        if segments:
            os.truncate(segments[-1], max(0, segments[-1].stat().st_size - num_bytes))

    def _segments(self) -> list[Path]:
        """Return the segments of the journal, the one that is being written last."""
        return sorted((self.run / FOLDER).glob("segment-*.journal"))

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait until the condition holds or the run has ended."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.is_running and not until():
            if time.monotonic() > deadline:
                raise PenstockError(f"the run stands still for {TIMEOUT_S:.0f} s; see {self._output}")
            time.sleep(LOOK_AGAIN_S)


def _copy(source: IO[bytes], target: Path) -> None:
    with source, target.open("ab", buffering=0) as file:
        for line in source:
            file.write(line)


@contextlib.contextmanager
def no_room(pid: int, largest_bytes: int) -> Iterator[None]:
    """Let no file of the process grow past so many bytes while the block runs."""
    _, hard = before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest_bytes, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


PROC = Path("/proc")


def workers_of(controller: int) -> dict[str, int]:
    """Return the names and process ids of a controller's present workers."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and _parent(entry) == controller:
            words = _words(entry)
            if "penstock.worker" in words and "--name" in words:
                found[words[words.index("--name") + 1]] = int(entry.name)
    return found


def _parent(entry: Path) -> int | None:
    try:
        # The name of the program, in brackets, may contain any character.
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):  # it has ended meanwhile
        return None


def _words(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


PIDFD_GETFD = 438
"""The system call's number; the C library has no name for it yet."""
CONTROLLER_SOCKET = "controller"
"""The file name of the socket that a controller listens on."""


def cut_off(pid: int) -> int:
    """Shut down every connection of this process to a controller, and return how many there were."""
    process = os.pidfd_open(pid)
    try:
        num_broken = 0
        for copy in _sockets(pid, process):
            with copy:
                if _reaches_controller(copy):
                    copy.shutdown(socket.SHUT_RDWR)
                    num_broken += 1
        return num_broken
    finally:
        os.close(process)


def _sockets(pid: int, process: int) -> Iterator[socket.socket]:
    """Yield copies of the process's open sockets, which the caller must close."""
    libc = ctypes.CDLL(None, use_errno=True)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if _is_socket(entry):
            copy = libc.syscall(PIDFD_GETFD, process, int(entry.name), 0)
            if copy >= 0:
                yield socket.socket(fileno=copy)


def _is_socket(entry: Path) -> bool:
    try:
        return os.readlink(entry).startswith("socket:")
    except OSError:  # it was closed meanwhile
        return False


def _reaches_controller(one: socket.socket) -> bool:
    try:
        return one.family == socket.AF_UNIX and Path(one.getpeername()).name == CONTROLLER_SOCKET
    except (OSError, TypeError):  # it is not connected, or its peer has no path
        return False
