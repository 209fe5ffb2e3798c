import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.processes.launchers.private_folder import PrivateFolder, remove_if_abandoned, sweep

HOLD = (
    "import sys, time, pathlib\n"
    "from penstock.processes.launchers.private_folder import PrivateFolder\n"
    "folder = PrivateFolder(pathlib.Path(sys.argv[1]))\n"
    "print(folder.path, flush=True)\n"
    "time.sleep(600)\n"
)


def test_it_is_there_for_its_owner_alone_until_it_is_removed(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path)
    assert folder.path.parent == tmp_path
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_that_of_a_live_process_stays_and_that_of_a_dead_one_is_swept(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert owner.stdout is not None
    other = Path(owner.stdout.readline().strip())
    (other / "weights").write_bytes(b"x")
    sweep(tmp_path)
    assert not remove_if_abandoned(other)
    assert (other / "weights").exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    mine = PrivateFolder(tmp_path)
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.remove()


def test_what_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "penstock-of-somebody").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").touch()
    (tmp_path / "penstock-a-file").touch()
    sweep(tmp_path)
    assert not remove_if_abandoned(tmp_path / "other")
    assert len(list(tmp_path.iterdir())) == 3
