"""Starts NVIDIA's multi-process service (MPS), with which processes on one GPU run at the same time instead of
in turns.

MPS is a daemon that a process finds through a folder named in its environment. Penstock starts a daemon of
its own in a private folder, passes its name to the workers that share a GPU, and stops it when they are gone.
A daemon that the environment already names is used and never stopped; others are ignored. Without a daemon
the processes still run, in time slices.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.channel.address import PRIVATE_FOLDER_PREFIX
from penstock.errors import PenstockError

COMMAND = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PERCENTAGE, PRIORITY = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_CLIENT_PRIORITY"
START_TIMEOUT_S = STOP_TIMEOUT_S = 15.0


class MpsUnavailable(PenstockError):
    """Says why no daemon can be started."""


@dataclass(frozen=True, slots=True)
class Mps:
    """Describes a daemon. `folders` are the variables by which its clients find it; none if they inherit them."""

    folders: Mapping[str, str]

    def environment(self, *, yields: bool = False) -> dict[str, str]:
        """Return the environment of a client. One that `yields` lets others go first where kernels wait for room
        on the GPU.

        It always gets all multiprocessors: with fewer, matmuls came out wrong (docs/performance.md).
        """
        return {**self.folders, PERCENTAGE: "100", PRIORITY: "1" if yields else "0"}


@contextmanager
def mps(environ: Mapping[str, str], log: Callable[[str], None]) -> Iterator[Mps | None]:
    """Run a daemon while the block runs. Yields None, with a log line, where none can be started."""
    if environ.get(PIPES):
        log(f"sharing the GPU through the MPS daemon of {environ[PIPES]}, which stays")
        yield Mps({})
        return
    folder = _private_folder()
    try:
        try:
            command, ours = _start(environ, folder)
        except MpsUnavailable as error:
            log(f"the GPU is shared in time slices, which gains nothing over taking turns: {error}")
            yield None
            return
        try:
            yield Mps(_folders(folder))
        finally:
            _stop(command, ours, log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def has_own_daemon(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a client of a daemon that a run started for itself."""
    return Path(environ.get(PIPES, "")).parent.name.startswith(PRIVATE_FOLDER_PREFIX)


def quit_orphan(environ: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
    """Tell the daemon of a killed controller, if it has one, to end. A worker calls this.

    The daemon ends after its last client, the caller among them, so the caller must not wait for it.
    """
    command, folder = shutil.which(COMMAND, path=environ.get("PATH")), Path(environ.get(PIPES, "")).parent
    if command is None or not folder.name.startswith(PRIVATE_FOLDER_PREFIX) or not folder.is_dir():
        return None
    return subprocess.Popen(
        ["/bin/sh", "-c", 'echo quit | "$0"; rm -rf "$1"', command, str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(environ),
        start_new_session=True,
    )


def _start(environ: Mapping[str, str], folder: Path) -> tuple[str, dict[str, str]]:
    """Start a daemon with its own folders and check that it answers. Return its command and environment."""
    command = shutil.which(COMMAND, path=environ.get("PATH"))
    if command is None:
        raise MpsUnavailable(f"{COMMAND} is not installed (it comes with NVIDIA's driver)")
    ours = {**environ, **_folders(folder)}
    for name in _folders(folder).values():
        Path(name).mkdir()
    _tell([command, "-d"], "", ours, START_TIMEOUT_S)
    try:
        _tell([command], "get_server_list\n", ours, START_TIMEOUT_S)
    except BaseException:
        _stop(command, ours, lambda line: None)
        raise
    return command, ours


def _stop(command: str, ours: dict[str, str], log: Callable[[str], None]) -> None:
    try:
        _tell([command], "quit\n", ours, STOP_TIMEOUT_S)
    except MpsUnavailable as error:
        log(f"the MPS daemon of {ours[PIPES]} could not be stopped: {error}")


def _tell(words: list[str], question: str, environ: dict[str, str], timeout_s: float) -> None:
    """Run one command, in a session of its own so that Ctrl-C in the terminal does not reach it.

    Its output goes to a file, since a daemon may keep the other end of a pipe open for as long as it lives.
    """
    with tempfile.TemporaryFile("w+") as output:
        try:
            ended = subprocess.run(
                words,
                input=question,
                env=environ,
                timeout=timeout_s,
                check=False,
                text=True,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as error:
            raise MpsUnavailable(f"{COMMAND} did not answer within {timeout_s:.0f} s") from error
        except OSError as error:
            raise MpsUnavailable(f"{COMMAND} can't be run: {error.strerror}") from error
        output.seek(0)
        said = " ".join(output.read().split()) or "nothing"
    if ended.returncode:
        raise MpsUnavailable(f"{COMMAND} ended with exit code {ended.returncode} and said: {said}")


def _folders(folder: Path) -> dict[str, str]:
    return {PIPES: str(folder / "pipe"), LOGS: str(folder / "log")}


def _private_folder() -> Path:
    """Make a private folder with a short path: the daemon makes sockets in it, whose paths may have 107 bytes."""
    short = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix=PRIVATE_FOLDER_PREFIX, dir=short if short.is_dir() else None))
