from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.run_views import watch_run
from penstock.observe.events import Span
from penstock.observe.views import SilentView
from penstock.orchestration.run_folder import held
from tests.observe.examples import phase, run_event, step
from tests.observe.store.written import write

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
