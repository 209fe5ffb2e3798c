import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.run_views import ViewSettings, Watcher, file_size, view_runs, watch_run
from penstock.errors import UserError
from penstock.observe.events import LogLine, Span
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.run_state import RunState
from penstock.observe.status import RunStatus
from penstock.observe.store.event_store import EventStore
from penstock.observe.views import SilentView
from penstock.run.run_folder import held
from tests.observe.examples import drop, phase, run_event, step
from tests.observe.store.written import KEPT, read, sample, write

SPAN = Span(process="trainer", time=102.0, track="step", name="step", start=101.0, attributes={"step": 1})
ENDED = [run_event(), phase("training", 100.5), SPAN, step(1, 102.0), phase("done", 103.0)]


def test_a_trace_is_written_into_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", ENDED)
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(tmp_path / "run")])
    assert ended.value.code == 0
    size = (tmp_path / "run" / "trace.pftrace").stat().st_size
    assert 20 < size < 1000
    assert capsys.readouterr().out.startswith(
        f"wrote {tmp_path}/run/trace.pftrace: 1 slices, 0 arrows, {size} bytes;"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trace", "bare"], "has no events"),
        (["view", "bare", "--terminal"], "has no events"),
        (["view", "empty", "bare", "--terminal"], "the terminal shows one run, got 2"),
        (["trace", "empty"], "has no spans"),
        (["view", "gone", "--plain"], "there is no run 'gone'"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bare").mkdir()
    write(tmp_path / "empty", [run_event()])
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", ENDED)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "run")])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path}/run/report.html: ")


def test_a_run_is_watched_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, ENDED)
    watch_run(str(tmp_path))
    assert "step 1/9" in capsys.readouterr().out


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    write(tmp_path, ENDED)
    slept: list[float] = []
    holding = held(tmp_path)
    holding.__enter__()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            holding.__exit__(None, None, None)

    watch_run(str(tmp_path), view=SilentView(), sleep=sleep)
    assert len(slept) == 3


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
        "dropped a group (stale): why; further ones are counted, not printed",
        "more",
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


def test_lines_of_an_ended_run_have_the_times_at_which_it_wrote_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = [run_event(), line("hello", 105.0), drop("stale", 103.0), step(1, 107.0), phase("done", 110.0)]
    write(tmp_path, ended)
    watch_run(str(tmp_path), plain=True)
    at = [time.strftime("%H:%M:%S", time.localtime(1.7e9 + seconds)) for seconds in (3, 5, 10)]
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{at[0]} dropped a group (stale)")
    assert second == f"{at[1]} hello"
    assert rest and all(one.startswith(f"{at[2]} ") for one in rest)


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [(0, "0 bytes"), (812, "812 bytes"), (41_300, "41 kB"), (3_190_000, "3.2 MB"), (1_500_000_000, "1.5 GB")],
)
def test_sizes_have_the_unit_that_fits(num_bytes: int, said: str) -> None:
    assert file_size(num_bytes) == said


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from penstock.cli import main; main(sys.argv[1:])"


@pytest.mark.processes
def test_a_run_is_shown_until_a_signal_comes(tmp_path: Path) -> None:
    write(tmp_path, [run_event(1.0), phase("training", 2.0), step(1, 3.0)])
    (tmp_path / "config.yaml").write_text("{}")
    command = [sys.executable, "-c", WITHOUT_TORCH, "view", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        try:
            address, _, rest = process.stdout.readline().partition(" ")
            base, _, token = address.partition("#token=")
            assert rest == "(Ctrl-C ends)\n" and base.startswith("http://127.0.0.1:")
            request = urllib.request.Request(f"{base}api/runs", headers={"X-Penstock-Token": token})
            with urllib.request.urlopen(request, timeout=20) as answer:
                (run,) = json.load(answer)["runs"]
            assert (run["last"], run["ended"]) == (1, "died")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


def test_a_folder_without_events_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no events"):
        view_runs([str(tmp_path)], ViewSettings(port=0))
