"""Progress in a notebook: one output that is replaced. With a stand-in for IPython, and with a real kernel."""

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from penstock.observe.config import ObserveConfig
from penstock.observe.notebook import NotebookView, drawn
from penstock.observe.terminal import TerminalView
from penstock.observe.views import PlainView, make_view
from tests.observe.examples import STATUS


class Cell:
    """What the output of a cell has been: bundles by display id, in the order in which they were shown."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, str]] = []
        self.num_updates = 0

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        self.outputs.append(data)
        number = len(self.outputs) - 1

        def update(data: dict[str, str], *, raw: bool) -> None:
            self.outputs[number] = data
            self.num_updates += 1

        return SimpleNamespace(update=update)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    _install(monkeypatch, SimpleNamespace(kernel=object()), cell)
    return cell


def _install(monkeypatch: pytest.MonkeyPatch, shell: Any, cell: Cell) -> None:
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    display.display = cell.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)


def test_a_kernel_gets_the_notebook_view_and_no_other_process_does(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(make_view(ObserveConfig()), NotebookView)
    assert isinstance(make_view(ObserveConfig(view="live")), NotebookView)
    assert isinstance(make_view(ObserveConfig(view="plain")), PlainView)
    _install(monkeypatch, SimpleNamespace(), cell)  # IPython in a terminal
    assert isinstance(make_view(ObserveConfig()), PlainView)
    assert isinstance(make_view(ObserveConfig(view="live")), TerminalView)
    _install(monkeypatch, None, cell)  # IPython imported by some library
    assert isinstance(make_view(ObserveConfig()), PlainView)


def test_progress_replaces_itself_and_lines_stay(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    view = NotebookView()
    view.log("the reward runs in a thread")
    for step in (3, 4, 5):
        view.update(dataclasses.replace(STATUS, step=step))
    view.log("Ctrl-C: stopping\x1b[2J")
    view.close()
    (output,) = cell.outputs
    assert cell.num_updates == 2
    assert "step 5/10" in output["text/plain"] and "step 5/10" in output["text/html"]
    assert capsys.readouterr().out == "the reward runs in a thread\nCtrl-C: stopping\\x1b[2J\n"


def test_text_of_others_can_not_become_html() -> None:
    shown = drawn(dataclasses.replace(STATUS, name="<script>alert(1)</script>"))
    assert "<script>" not in shown["text/html"]
    assert "&lt;script&gt;" in shown["text/html"]
    assert shown["text/html"].startswith("<pre")


TRAIN = """
import json, penstock
summary = penstock.train(
    model={model!r},
    tasks=[dict(prompt=f"{{a}}+1=") for a in range(20)],
    reward=lambda task, completion: completion.count("7") / 4,
    steps=100_000,
    rollout=dict(max_new_tokens=4, groups_per_step=2, group_size=4),
    run=dict(folder={folder!r}),
)
print("SUMMARY", json.dumps([summary.steps, summary.stopped_early, summary.folder]))
summary
"""


@pytest.mark.xdist_group("processes")
def test_in_a_real_kernel_progress_is_one_output_and_an_interrupt_saves_and_returns_the_summary(
    tiny_model: Path, tmp_path: Path
) -> None:
    kernel, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute(TRAIN.format(model=str(tiny_model), folder=str(tmp_path)))
        outputs, updates, text, results, interrupted = set[str](), list[str](), "", list[Any](), False
        while True:
            message = client.get_iopub_msg(timeout=120)
            kind, content = message["msg_type"], message["content"]
            if kind in ("display_data", "update_display_data"):
                outputs.add(content["transient"]["display_id"])
                updates.append(content["data"]["text/plain"])
                if not interrupted and "step 0/" not in updates[-1] and "training" in updates[-1]:
                    kernel.interrupt_kernel()
                    interrupted = True
            elif kind == "stream":
                text += content["text"]
            elif kind == "execute_result":
                results.append(content["data"])
            elif kind == "error":
                pytest.fail("\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle" and text:
                break
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert len(outputs) == 1 and len(updates) > 3
    assert "Ctrl-C: stopping after this step; the model will be saved" in text
    line = next(line for line in text.splitlines() if line.startswith("SUMMARY"))
    steps, stopped_early, folder = json.loads(line.removeprefix("SUMMARY "))
    assert 0 < steps < 100_000 and stopped_early
    assert Path(folder, "model", "model.safetensors").is_file()
    assert "<table>" in results[0]["text/html"]
