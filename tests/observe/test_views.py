import dataclasses
import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel
from rich.console import Console

from penstock.observe.config import ObserveConfig
from penstock.observe.readers import show
from penstock.observe.screen import Screen
from penstock.observe.status import ExpertStatus, SampleStatus
from penstock.observe.views import NotebookView, PlainView, TerminalView, drawn, make_view, progress_line
from tests.observe.examples import STATUS, run_event


def test_a_progress_line_says_who_waits_for_what() -> None:
    assert progress_line(STATUS) == (
        "step 3/10  about 1 min 15 s to go  reward 0.250  1,234 tok/s  staleness 1.50 (max 3)  limit: engines  "
        "trainer 25% (waiting for groups: 5 of 8 groups ready, 3 running); "
        "engine0 100% (24 running, 0 waiting)"
    )


def test_a_progress_line_tells_of_experts_that_flipped() -> None:
    experts = ExpertStatus(replayed=1.0, flipped=0.021, gap=0.0, gap_without=0.0)
    assert "(max 3)  experts 2.1% flipped  limit: engines" in progress_line(
        dataclasses.replace(STATUS, experts=experts)
    )
    unknown = ExpertStatus(replayed=0.0, flipped=None, gap=None, gap_without=None)
    assert "  experts – flipped  " in progress_line(dataclasses.replace(STATUS, experts=unknown))


def test_a_progress_line_has_what_a_users_loss_reports() -> None:
    status = dataclasses.replace(STATUS, own_metrics={"my_weight": 0.93125})
    assert "(max 3)  my_weight 0.9313  limit: engines" in progress_line(status)


def test_brackets_are_shown_and_not_taken_for_styles() -> None:
    out = io.StringIO()
    console = Console(file=out, width=140, force_terminal=False)
    TerminalView(console).log("late: [red] of penstock[gpu]")
    console.print(Screen(dataclasses.replace(STATUS, name="run[b]")))
    assert "late: [red] of penstock[gpu]" in out.getvalue()
    assert "run[b] · training" in out.getvalue()


def test_the_live_view_shows_lines_and_samples_escaped_and_bounded() -> None:
    out = io.StringIO()
    console = Console(file=out, width=140, force_terminal=False)
    sample = SampleStatus(
        reward=1.0,
        prompt="\x1b[2J7",
        text="\x1b]0;x\x07" + "y" * 3_000_000,
        oldest_version=1,
        newest_version=2,
    )
    TerminalView(console).log("\x1b[2J" + "x" * 3_000_000)
    console.print(Screen(dataclasses.replace(STATUS, last_sample=sample)))
    assert "\x1b" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert out.getvalue().startswith("\\x1b[2Jxxx")
    assert "\\x1b]0;x\\x07yyy" in out.getvalue()
    assert len(out.getvalue()) < 5000


def test_a_line_of_others_is_shown_escaped_bounded_and_in_any_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    PlainView(1.0).log("–\x1b[2J" + "x" * 3_000_000)
    assert raw.getvalue()[8:18] == b" ?\\x1b[2Jx"
    assert len(raw.getvalue()) < 2200


def test_the_plain_view_says_each_phase_once_and_progress_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = PlainView(5.0)
    show(view).stream.emit(run_event())
    for phase, elapsed_s in (("verifying", 1.0), ("verifying", 2.0), ("training", 3.0), ("training", 7.0)):
        view.update(dataclasses.replace(STATUS, phase=phase, elapsed_s=elapsed_s))
    lines = [line[9:] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "starting: reading tasks and tokenizer",
        "verifying",
        "training",
        progress_line(STATUS),
    ]


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


@pytest.mark.full
@pytest.mark.processes
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
