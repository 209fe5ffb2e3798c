"""Which source a name chooses, and what an unknown one is told."""

from pathlib import Path

import pytest

from penstock.errors import TaskError
from penstock.tasks.config import TasksConfig
from penstock.tasks.sources import load_tasks


def test_the_default_is_the_built_in_task() -> None:
    tasks = load_tasks(TasksConfig())
    assert len(tasks) == 4096
    assert tasks[0].columns.keys() == {"answer"}


def test_the_limit_holds_for_every_source() -> None:
    assert len(load_tasks(TasksConfig(limit=5))) == 5


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "reasning_gym:chain_sum",
            "unknown task source 'reasning_gym:chain_sum'; did you mean reasoning_gym:…?",
        ),
        ("dataset:x", "unknown task source 'dataset:x'; did you mean datasets:…?"),
        (
            "notes.txt",
            "unknown task source 'notes.txt'; a task file must be JSON lines, with a name that ends in",
        ),
        ("whatever", "unknown task source 'whatever'; it must be FILE.jsonl, datasets:NAME"),
        ("", "unknown task source ''; it must be FILE.jsonl"),
        ("https://host/x:y", "unknown task source 'https://host/x:y'; it must be"),
    ],
)
def test_an_unknown_source_gets_a_hint(
    source: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(TaskError) as raised:
        load_tasks(TasksConfig(source=source))
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)
