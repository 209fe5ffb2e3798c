"""`penstock view` as a process: it prints an address, answers there, and ends by a signal."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from penstock.cli.view import ViewSettings, view_runs
from penstock.errors import UserError
from tests.observe.examples import phase, run_event, step
from tests.observe.store.written import write

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from penstock.cli import main; main(sys.argv[1:])"


def test_a_run_is_shown_until_a_signal_comes(tmp_path: Path) -> None:
    write(tmp_path, [run_event(1.0), phase("training", 2.0), step(1, 3.0)])
    (tmp_path / "config.yaml").write_text("{}")
    command = [sys.executable, "-c", WITHOUT_TORCH, "view", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        try:
            address, _, rest = process.stdout.readline().partition(" ")
            base, _, token = address.partition("#token=")
            assert rest == "(Ctrl-C ends)\n" and base.startswith("http://127.0.0.1:")
            request = urllib.request.Request(f"{base}api/runs", headers={"X-Penstock-Token": token})
            with urllib.request.urlopen(request, timeout=20) as answer:
                (run,) = json.load(answer)["runs"]
            assert (run["last"], run["ended"]) == (1, "died")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


def test_a_folder_without_events_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no events"):
        view_runs([str(tmp_path)], ViewSettings(port=0))
