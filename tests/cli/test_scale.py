import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.cli.scale import join_run, read_wish, scale_run
from penstock.errors import ConfigError, UserError
from penstock.run.engine_fleet import REQUEST, ScaleRequest, answer_request
from penstock.run.run_folder import held


@pytest.mark.parametrize("wish", ["4", "engines", "engines=", "engines=0", "engines=-1", "trainers=2"])
def test_other_words_are_refused(wish: str) -> None:
    with pytest.raises(UserError, match=r"takes engines=N with N of at least 1, or engines=auto, got"):
        read_wish(wish)


def test_a_run_that_has_ended_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match="is not running"):
        scale_run(str(tmp_path), "engines=2")


def test_the_answer_of_the_run_is_printed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    asked = []

    def run() -> None:
        while not (tmp_path / REQUEST).exists():
            pass
        asked.append(json.loads((tmp_path / REQUEST).read_text()))
        answer_request(tmp_path, "from 1 to 3 engines")

    with held(tmp_path):
        thread = threading.Thread(target=run)
        thread.start()
        assert scale_run(str(tmp_path), "engines=3") == f"{tmp_path}: from 1 to 3 engines"
        thread.join()
    assert asked == [{"engines": 3}]
    assert read_wish("engines=auto") == ScaleRequest(None)


PENSTOCK = (sys.executable, "-c", "from penstock.cli import main; main()")


def test_another_machine_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--token-file: .*token can't be read: No such file"):
        join_run("10.0.0.9:7000", tmp_path / "token")
    with pytest.raises(ConfigError, match="--connect must be HOST:PORT, got '7000'"):
        join_run("7000", tmp_path / "token")


def test_a_run_that_is_not_there_is_one_sentence(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    assert join_run("127.0.0.1:1", tmp_path / "token") == 3
    assert "can't reach the controller at 127.0.0.1:1: Connection refused" in capfd.readouterr().err


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.timeout(900)
def test_engines_join_a_run_by_hand_and_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    run, output = tmp_path / "runs" / "demo", tmp_path / "output.txt"
    settings = ("run.steps=4000", "eval.every=0", "observe.view=plain", f"run.folder={tmp_path / 'runs'}")
    listen = ("launcher.listen=127.0.0.1:0", f"launcher.token_file={tmp_path / 'token'}")
    with output.open("wb") as file:
        training = subprocess.Popen(
            [*PENSTOCK, "train", *settings, *listen], stdout=file, stderr=file, cwd=tmp_path
        )
    try:
        wait_for(output, " training\n", training)
        address = output.read_text().partition("--connect ")[2].split()[0]
        assert scale_run(str(run), "engines=2").endswith("from 1 to 2 engines")
        wait_for(output, "engine1 joins after", training)
        joined = subprocess.Popen(
            [*PENSTOCK, "worker", "--connect", address, "--token-file", str(tmp_path / "token")],
        )
        wait_for(output, "engine2 joins after", training)
        assert scale_run(str(run), "engines=1").endswith("to 1 engines")
        wait_for(output, "engine1 leaves: 2 engines", training)
        joined.kill()  # its worker ends with it
        joined.wait()
        wait_for(output, "engine2 is gone, 1 engines keep running", training)
    finally:
        training.terminate()
        assert training.wait(200) == 0, output.read_text()
    assert (run / "model" / "config.json").exists()


def wait_for(output: Path, text: str, process: "subprocess.Popen[bytes]", seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while text not in output.read_text():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)
