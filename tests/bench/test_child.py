import pytest

from penstock.bench import child
from penstock.bench.child import Child, ChildDied

pytestmark = pytest.mark.processes


def test_a_process_that_ends_or_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Child("first", "penstock.nowhere", [])
    with pytest.raises(ChildDied, match="the first process ended with code 1"):
        gone.ask(b"work")
    gone.close()
    monkeypatch.setattr(child, "ANSWER_S", 0.2)
    silent = Child("second", "json.tool", [])  # says nothing before its input ends
    with pytest.raises(ChildDied, match="the second process did not answer within 0 s"):
        silent.ask(b"{}")
    silent.close()
    silent.close()


def test_lines_go_in_and_json_comes_out() -> None:
    listener = Child("echo", "json.tool", ["--json-lines", "--compact"])
    listener.tell(b'{"a": 1}')
    assert listener._process.stdin is not None
    listener._process.stdin.close()
    assert listener.read() == {"a": 1}
    listener.close()
