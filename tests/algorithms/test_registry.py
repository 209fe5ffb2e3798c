import pytest

from penstock.algorithms.registry import Registry
from penstock.errors import ConfigError, PenstockError, UserError


def test_register_bind_and_refuse():
    registry = Registry("thing", takes=("value",))

    @registry.register("scale")
    def scale(value, *, by=2.0):
        """Scales.

        By a factor."""
        return value * by

    assert registry.names() == ("scale",)
    assert registry.bind("scale", {})(3) == 6
    assert registry.bind("scale", {"by": 5.0})(3) == 15
    (entry,) = registry.describe()
    assert (entry.kind, entry.name, entry.summary, entry.parameters) == (
        "thing",
        "scale",
        "Scales.",
        {"by": 2.0},
    )
    with pytest.raises(ConfigError, match="unknown thing 'scal'; did you mean 'scale'"):
        registry.get("scal")
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("scale")(scale)


FUNCTIONS = """
from penstock.algorithms.ranges import Positive

def scale(value, *, by: Positive = 2.0, plain=True):
    return value * by

def must_be_told(value, factor):
    return value * factor

def takes_none():
    return 0

def divides(value, by=0):
    return value / by

def nothing(value):
    pass

two = 2
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FUNCTIONS)
    return path


def doubled(result, value):
    if result < value:
        raise ValueError(f"a number of at least {value}, got {result}")
    return result * 2


def test_a_users_function_is_named_by_path_and_its_settings_are_checked_like_ours(file):
    registry = Registry("thing", takes=("value",), check=doubled)
    name = f"{file}:scale"
    assert registry.parameters(name) == {"by": 2.0, "plain": True}
    assert registry.bind(name, {"by": 5.0, "plain": False})(3) == 30
    assert registry.bind(f"{file}:must_be_told", {"factor": 2})(3) == 12
    for function, arguments, message in [
        ("scale", {"bye": 1}, f"unknown parameter 'bye' of thing '{name}'; did you mean 'by'?"),
        ("scale", {"by": -1}, f"by of thing '{name}' must be > 0, got -1"),
        ("scale", {"by": "much"}, f"by of thing '{name}' must be a number, got 'much'"),
        ("must_be_told", {}, f"thing '{file}:must_be_told' needs a value for factor; none was given"),
        (
            "takes_none",
            {},
            f"the thing '{file}:takes_none' must be a function of (value) and its settings, got one of ()",
        ),
        ("two", {}, f"the thing '{file}:two': {file} has no function 'two'"),
        ("absent", {}, f"the thing '{file}:absent': {file} has no function 'absent'"),
    ]:
        with pytest.raises(PenstockError) as raised:
            registry.bind(f"{file}:{function}", arguments)
        assert str(raised.value) == message


def test_what_a_users_function_raises_or_returns_amiss_is_a_sentence_that_names_it(file):
    registry = Registry("thing", takes=("value",), check=doubled)
    with pytest.raises(UserError) as raised:
        registry.bind(f"{file}:divides", {})(3)
    assert str(raised.value) == (
        f"the thing '{file}:divides' failed: ZeroDivisionError: division by zero (own.py, line 14)"
    )
    with pytest.raises(UserError) as raised:
        registry.bind(f"{file}:scale", {"by": 0.1})(10)
    assert str(raised.value) == f"the thing '{file}:scale' must return a number of at least 10, got 1.0"
    with pytest.raises(
        UserError, match=r"own.py:nothing' has returned a NoneType, which can't be used: '<' not"
    ):
        registry.bind(f"{file}:nothing", {})(3)


def test_a_config_is_read_without_executing_a_users_file(tmp_path):
    registry = Registry("thing", takes=("value",))
    registry.check_name(f"{tmp_path}/not_there.py:scale", {"by": 1})
    with pytest.raises(ConfigError, match="name your own by path: module:function or file.py"):
        registry.check_name("scale", {})
