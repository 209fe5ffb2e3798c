"""User functions by name, from modules, files and scripts that would start a training."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UserError
from penstock.usercode import (
    describe_callable,
    is_function_path,
    load_function,
    loading_user_code,
    stop_if_loading_user_code,
)

SCRIPT = """
import penstock.usercode as library

def train():
    library.stop_if_loading_user_code()
    raise AssertionError("a second training was started")

def reward(task, completion):
    return later() if "later" in globals() else 1.0

train()

def later():
    return 2.0
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def fails(path: str) -> str:
    with pytest.raises(UserError) as raised:
        load_function(path, what="reward")
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("module:function", True),
        ("package.module:function", True),
        ("path/to/file.py:function", True),
        ("/abs/file.py:function", True),
        ("file.py", False),
        ("module:", False),
        (":function", False),
        ("module:a.b", False),
        ("path/module:function", False),
        ("two words:function", False),
    ],
)
def test_the_form_of_a_path(text: str, expected: bool) -> None:
    assert is_function_path(text) is expected


def test_a_function_of_a_module() -> None:
    assert load_function("posixpath:join", what="reward")("a", "b") == "a/b"


def test_a_module_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "rewards_in_cwd.py", "def f(): return 5")
    assert load_function("rewards_in_cwd:f", what="reward")() == 5


def test_a_file_may_import_its_neighbours_and_is_executed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "neighbour_of_rewards.py", "calls = []")
    path = write(
        tmp_path,
        "rewards.py",
        "import neighbour_of_rewards\nneighbour_of_rewards.calls.append(1)\n"
        "def f(): return len(neighbour_of_rewards.calls)\ndef g(): return f",
    )
    f = load_function(f"{path}:f", what="reward")
    assert f() == 1
    assert load_function(f"{path}:g", what="reward")() is f


def test_files_of_the_same_name_are_different_modules(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number), "rewards.py", f"def f(): return {number}")
    assert [load_function(f"{tmp_path}/{number}/rewards.py:f", what="reward")() for number in (1, 2)] == [
        1,
        2,
    ]


def test_a_file_may_define_dataclasses(tmp_path: Path) -> None:
    imports = "from __future__ import annotations\nimport dataclasses\n"
    code = "@dataclasses.dataclass\nclass A:\n    x: int\ndef f(): return A(3).x"
    path = write(tmp_path, "classes.py", imports + code)
    assert load_function(f"{path}:f", what="reward")() == 3


def test_a_script_without_a_guard_is_loaded_up_to_its_training(tmp_path: Path) -> None:
    path = write(tmp_path, "script.py", SCRIPT)
    assert load_function(f"{path}:reward", what="reward")(None, "") == 1.0
    assert fails(f"{path}:later") == f"the reward '{path}:later': {path} has no function 'later'"


def test_a_module_without_a_guard_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "script_module.py", SCRIPT)
    assert "it calls penstock.train on import; guard the call" in fails("script_module:reward")


def test_outside_of_loading_nothing_is_stopped(tmp_path: Path) -> None:
    stop_if_loading_user_code()
    path = write(tmp_path, "plain.py", "def f(): return 1")
    load_function(f"{path}:f", what="reward")
    stop_if_loading_user_code()
    with pytest.raises(BaseException) as raised, loading_user_code():
        stop_if_loading_user_code()
    assert not isinstance(raised.value, Exception)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import no_such_module_here", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("def f(:", "SyntaxError: "),
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_fails_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path, "broken.py", text)
    assert fails(f"{path}:f").startswith(f"the reward file {path} could not be loaded: {sentence}")
    path.write_text("def f(): return 1")
    assert load_function(f"{path}:f", what="reward")() == 1


def test_a_module_that_leaves_python_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "module_that_leaves.py", "import sys; sys.exit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert fails("module_that_leaves:f").endswith("could not be imported: SystemExit: 0")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "values.py", "f = 3")
    assert fails("none.py:f") == f"the reward file none.py does not exist in the current folder, {Path.cwd()}"
    assert fails(f"{tmp_path}/none.py:f") == f"the reward file {tmp_path}/none.py does not exist"
    assert fails(f"{path}:f") == f"the reward '{path}:f': {path} has no function 'f'"
    assert fails("no_such_module_here:f").startswith(
        "the reward module 'no_such_module_here' could not be imported: ModuleNotFoundError"
    )
    assert fails("nothing") == "a reward must be module:function or path/to/file.py:function, got 'nothing'"


def module_level(task: Any, completion: str) -> float:
    return 0.0


def make_closure() -> Callable[..., Any]:
    def inside() -> None: ...

    return inside


class Methods:
    def method(self) -> None: ...


def test_describing_a_function_of_a_module() -> None:
    assert describe_callable(module_level) == f"{__name__}:module_level"


@pytest.mark.parametrize(
    "function",
    [
        lambda task, completion: 0.0,
        make_closure(),
        Methods().method,
        functools.partial(module_level),
        Methods(),
    ],
    ids=["lambda", "closure", "method", "partial", "object"],
)
def test_what_no_other_process_can_load_has_no_description(function: Callable[..., Any]) -> None:
    assert describe_callable(function) is None


def test_a_loaded_file_is_described_by_its_file(tmp_path: Path) -> None:
    path = write(tmp_path, "rewards.py", "def f(): return 1")
    described = describe_callable(load_function(f"{path}:f", what="reward"))
    assert described == f"{path.resolve()}:f"


def test_functions_of_a_script_are_described_by_its_file(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "from penstock.usercode import describe_callable\n"
        "def top(): ...\n"
        "named = lambda: 0\n"
        "if __name__ == '__main__':\n"
        "    def guarded(): ...\n"
        "    print(describe_callable(top), describe_callable(named), describe_callable(guarded))\n",
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment(),
    )
    assert done.stdout.strip() == f"{script.resolve()}:top None None"


def test_a_function_typed_into_an_interpreter_has_no_description() -> None:
    code = "from penstock.usercode import describe_callable\ndef f(): ...\nprint(describe_callable(f))"
    done = subprocess.run(
        [sys.executable, "-"],
        input=code,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment(),
    )
    assert done.stdout.strip() == "None"


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parent.parent)}
