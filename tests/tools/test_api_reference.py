"""The API reference has every public name, and a meaning for all that it shows."""

from pathlib import Path
from types import ModuleType

import msgspec
import pytest

import penstock
import penstock.records

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import api_reference

    return api_reference


def shown_names(tool: ModuleType) -> set[str]:
    return {entry.partition(":")[2] for part in tool.BOOK for entry in part.entries}


def test_every_public_name_and_every_record_is_in_it(tool: ModuleType) -> None:
    records = {
        name
        for name in penstock.records.__all__
        if isinstance(getattr(penstock.records, name), type)
        and issubclass(getattr(penstock.records, name), msgspec.Struct)
    }
    wanted = (set(penstock.__all__) - {"__version__"}) | (records - {"Record"})
    assert wanted - shown_names(tool) == set(), "add these to BOOK in tools/api_reference.py"
    assert {"Workflow", "Rollout", "Scorer", "Engine", "Summary"} <= shown_names(tool)


def test_all_that_is_shown_says_what_it_is_for(tool: ModuleType) -> None:
    silent = []
    for part in tool.BOOK:
        for entry in part.entries:
            found = tool.read(entry)
            silent += [] if found.text else [entry]
            silent += [f"{entry}.{field.name}" for field in found.fields if not field.text]
            silent += [
                f"{entry}.{method.name}"
                for method in found.methods
                if not method.text and method.name not in part.without
            ]
    assert silent == [], "give these docstrings: docs/api.md shows them"


def test_the_page_is_in_a_readers_order_and_links_every_section(tool: ModuleType) -> None:
    page = tool.api_reference()
    places = [page.index(f"### `{name}`") for name in ("penstock.train", "penstock.Task", "penstock.Score")]
    places.append(page.index("### `penstock.records.interfaces.Engine`"))
    places.append(page.index("- [`staleness`](configuration.md#staleness): "))
    assert places == sorted(places)
    assert "| `prompt: str \\| tuple[Message, ...]` | Text, or chat messages. |" in page
    assert (
        "def continue_(turn: Turn, addition: str | Messages) -> list[int]\n    # Return the context after"
        in page
    )
    assert "- `ConfigError`: A config file, section or override is wrong." in page
