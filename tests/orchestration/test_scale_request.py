import errno
import io
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


def test_what_is_no_text_is_no_request(tmp_path: Path) -> None:
    (tmp_path / REQUEST).write_bytes(b'{"engines": "\xff"}')
    assert take(tmp_path) is None
    (tmp_path / REQUEST).write_text("[" * 100_000)
    assert take(tmp_path) is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_folder_that_can_not_be_read_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    ask(tmp_path, ScaleRequest(4))

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "of the test")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fail)
        patched.setattr(io, "open", fail)
        assert take(tmp_path) is None
    assert take(tmp_path) == ScaleRequest(4)


def test_an_answer_that_can_not_be_written_ends_nothing(tmp_path: Path) -> None:
    answer(tmp_path / "gone", "from 2 to 4 engines")
    assert read_answer(tmp_path / "gone") is None
