from pathlib import Path

from penstock.observe.events import LogLine
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.run_state import RunState
from penstock.observe.status import RunStatus
from penstock.observe.store.event_store import EventStore
from penstock.observe.views import SilentView
from penstock.observe.watching import Watcher
from penstock.orchestration.run_folder import held
from tests.observe.examples import drop, phase, run_event, step
from tests.observe.store.written import KEPT, read, sample, write


class Drawing(SilentView):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[RunStatus] = []

    def update(self, status: RunStatus) -> None:
        self.drawn.append(status)


def line(text: str, time: float) -> LogLine:
    return LogLine(process="controller", time=time, line=text)


def test_a_run_that_goes_on_is_followed_to_its_end(tmp_path: Path) -> None:
    view, state = Drawing(), RunState()

    def tell(*events) -> None:
        for event in events:
            state.on(event)
            store.on(event)
        store.flush()

    with held(tmp_path):
        store = EventStore(tmp_path, state, KEPT)
        tell(run_event(), line("hello", 100.5), phase("training", 101.0))
        watcher = Watcher(RunReading(tmp_path), view)
        assert watcher.look()
        tell(step(1, 102.0), drop("stale", 103.0), drop("stale", 103.0), line("more", 103.5))
        assert watcher.look()
        tell(step(2, 104.0), phase("done", 105.0))
        store.close()
    assert not watcher.look()
    assert [(status.step, status.phase) for status in view.drawn] == [
        (0, "training"),
        (1, "training"),
        (2, "done"),
    ]
    assert view.lines == [
        "hello",
        "more",
        "dropped a group (stale): why; further ones are counted, not printed",
    ]
    watcher.show_end()
    assert view.lines[3] == f"{tmp_path} has ended"


def test_a_run_that_died_is_said_to_have(tmp_path: Path) -> None:
    write(tmp_path, [run_event(), phase("training", 101.0), sample(1), step(1, 102.0)], close=False)
    view = Drawing()
    watcher = Watcher(read(tmp_path), view)
    assert not watcher.look()
    watcher.show_end()
    assert view.lines[0] == f"{tmp_path} stopped in the phase 'training' and writes no more"
    assert "step 1/9" in view.lines[1]
    assert view.drawn[-1].left_s is None
    assert not any("to go" in line for line in view.lines)
    assert read(tmp_path).status().left_s is not None  # or this test would show nothing


def test_hostile_text_stays_text(tmp_path: Path, capsys) -> None:
    from penstock.observe.views import PlainView

    answer = "\x1b[2J\x1b]0;pwned\x07[bold red]x[/] <script>"
    write(tmp_path, [run_event(), line("say \x1b[31m", 100.5), sample(1, answer=answer), step(1, 102.0)])
    watcher = Watcher(read(tmp_path), PlainView(1.0))
    watcher.look()
    watcher.show_end()
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown
    assert "[bold red]x[/] <script>" in shown
