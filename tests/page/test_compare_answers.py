from pathlib import Path

from penstock.page.compare_answers import UNSET, compare_configs, same_task, shared_tasks
from tests.observe.examples import run_event
from tests.observe.store.written import read, sample, write


def test_only_what_differs_is_shown() -> None:
    first = {
        "run": {"seed": 1, "steps": 9},
        "algorithm": {"corrections": {"tis": {"cap": 2}}},
        "old": {"a": 1},
    }
    second = {"run": {"seed": 2, "steps": 9}, "algorithm": {"corrections": {}}}
    found = {one.name: one.values for one in compare_configs([first, second])}
    assert found == {
        "run.seed": (1, 2),
        "algorithm.corrections": (UNSET, {}),
        "algorithm.corrections.tis.cap": (2, UNSET),
        "old.a": (1, UNSET),
    }
    assert compare_configs([first, first]) == compare_configs([]) == []
    assert repr(UNSET) == "–"


def test_answers_to_the_same_task(tmp_path: Path) -> None:
    runs = []
    for name, tasks in (("a", "xyx"), ("b", "zx")):
        write(tmp_path / name, [run_event(), *(sample(n, task_id=task) for n, task in enumerate(tasks))])
        runs.append(read(tmp_path / name))
    assert shared_tasks(runs, {}) == {"total": 1, "tasks": ["x"]}
    assert [rows.tolist() for rows in same_task(runs, "x")] == [[0, 2], [1]]
