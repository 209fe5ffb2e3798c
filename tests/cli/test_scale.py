import json
import threading
from pathlib import Path

import pytest

from penstock.cli.scale import read_wish, scale_run
from penstock.errors import UserError
from penstock.orchestration.engine_fleet import REQUEST, ScaleRequest, answer_request
from penstock.orchestration.run_folder import held


@pytest.mark.parametrize("wish", ["4", "engines", "engines=", "engines=0", "engines=-1", "trainers=2"])
def test_other_words_are_refused(wish: str) -> None:
    with pytest.raises(UserError, match=r"takes engines=N with N of at least 1, or engines=auto, got"):
        read_wish(wish)


def test_a_run_that_has_ended_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match="does not go on"):
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
