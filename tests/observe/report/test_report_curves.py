from pathlib import Path

from penstock.observe.events import EvaluationEvent
from penstock.observe.report.report_curves import plots_of
from tests.observe.examples import run_event, step
from tests.observe.store.written import read, write


def test_plots_are_of_what_the_run_has(tmp_path: Path) -> None:
    heldout = EvaluationEvent(
        process="controller", time=101.0, step=0, reward=0.25, num_episodes=8, num_failed=0
    )
    write(tmp_path, [run_event(), heldout, *(step(number, 101.0 + number) for number in range(1, 5))])
    found = {plot.file: plot for plot in plots_of(read(tmp_path))}
    assert list(found) == ["reward", "staleness", "tokens"]
    assert [curve.name for curve in found["reward"].curves] == ["reward", "held-out"]
    assert list(found["staleness"].curves[0].y) == [1.5] * 4
