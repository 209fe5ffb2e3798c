from pathlib import Path

import pytest

from penstock.orchestration.scale_request import REQUEST, ScaleRequest, answer, ask, read_answer, take


def test_a_request_is_taken_once_and_answered(tmp_path: Path) -> None:
    assert take(tmp_path) is None
    answer(tmp_path, "of the last time")
    ask(tmp_path, ScaleRequest(4))
    assert read_answer(tmp_path) is None
    assert take(tmp_path) == ScaleRequest(4)
    assert take(tmp_path) is None
    answer(tmp_path, "from 2 to 4 engines")
    assert read_answer(tmp_path) == "from 2 to 4 engines"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"engines": 0}', '{"engines": "two"}', '{"other": 1}'])
def test_something_else_is_no_request(tmp_path: Path, text: str) -> None:
    (tmp_path / REQUEST).write_text(text)
    assert take(tmp_path) is None
    assert not (tmp_path / REQUEST).exists()
