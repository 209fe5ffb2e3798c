"""What is read of a module's source."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.tools.loaded_files import TOOLS

SOURCE = '''
Kind = Literal["a", "b"]
"""What there is."""
Silent = int


class Thing:
    """A thing."""

    size: int = 3
    """How large."""
    name: str
    _hidden: int = 0

    @property
    def half(self) -> float:
        """Half of it."""

    @classmethod
    def of(cls, size: int) -> "Thing":
        """Makes one."""

    def _secret(self) -> None: ...


async def act(
    thing: Thing, /, other: int = 1, *, quickly: bool = False, mode: str = "x", callback: Callable[..., Any] | None = None, **rest: Any
) -> None:
    """Acts.

    With care."""
'''


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "shown_module.py").write_text(
        "from collections.abc import Callable\nfrom typing import Any, Literal\n" + SOURCE
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.delitem(sys.modules, "shown_module", raising=False)
    import source_docs

    return source_docs


def test_a_class_has_its_fields_and_methods_with_their_docstrings(tool: ModuleType) -> None:
    thing = tool.read("shown_module:Thing")
    assert thing.text == "A thing."
    assert [(str(field), field.text) for field in thing.fields] == [
        ("size: int = 3", "How large."),
        ("name: str", ""),
    ]
    assert [(method.signature, method.text) for method in thing.methods] == [
        ("half: float", "Half of it."),
        ("def of(size: int) -> Thing", "Makes one."),
    ]


def test_a_long_signature_has_a_line_for_each_parameter(tool: ModuleType) -> None:
    act = tool.read("shown_module:act")
    assert act.text == "Acts.\n\nWith care."
    assert act.signature == (
        "async def act(\n"
        "    thing: Thing,\n"
        "    /,\n"
        "    other: int = 1,\n"
        "    *,\n"
        "    quickly: bool = False,\n"
        '    mode: str = "x",\n'
        "    callback: Callable[..., Any] | None = None,\n"
        "    **rest: Any,\n"
        ") -> None"
    )


def test_an_alias_is_what_is_assigned_and_the_string_after_it(tool: ModuleType) -> None:
    kind = tool.read("shown_module:Kind")
    assert (kind.signature, kind.text) == ('Kind = Literal["a", "b"]', "What there is.")
    with pytest.raises(LookupError, match="penstock.records assigns nothing to Interrupt"):
        tool.read("penstock.records:Interrupt")
