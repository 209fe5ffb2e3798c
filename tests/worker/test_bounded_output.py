import io
import sys

import pytest

from penstock.worker.bounded_output import BoundedOutput, bound_prints


def test_output_ends_with_a_word_when_there_is_too_much_of_it() -> None:
    stream = io.StringIO()
    output = BoundedOutput(stream, 10)
    for _ in range(3):
        assert output.write("1234\n") == 5
    output.write("x" * 1000)
    output.flush()
    assert stream.getvalue() == "1234\n1234\n[further output is left out]\n"


def test_a_line_that_is_too_long_is_cut() -> None:
    stream = io.StringIO()
    assert BoundedOutput(stream, 4).write("x" * 1000) == 1000
    assert stream.getvalue() == "xxxx\n[further output is left out]\n"


def test_prints_of_user_code_are_bounded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    bound_prints(100)
    for _ in range(1000):
        print("a reward says something")
        print("and complains", file=sys.stderr)
    told = capsys.readouterr()
    assert len(told.out) < 150
    assert len(told.err) < 150
    assert sys.stdout.encoding
