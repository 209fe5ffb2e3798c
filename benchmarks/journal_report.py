"""`python -m benchmarks journal`: what it costs that nothing is lost.

`cost` is throughput with the journal against without (`benchmarks.journal_cost`); `short_answers` the same
where answers have four tokens, only when asked for. `crashes` counts violations of the promise in random schedules
(`benchmarks.crash_schedules`), `kills` says what a kill costs a real run (`benchmarks.killed_run`).
"""

from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from benchmarks import crash_schedules, journal_cost, killed_run
from penstock.bench.saved_report import SavedReport

Part = Literal["cost", "short_answers", "crashes", "kills"]


def run(
    json_path: Path | None = None, *, pairs: int = journal_cost.PAIRS, only: Part | None = None
) -> dict[str, Any]:
    report, console = SavedReport(json_path), Console()
    if only in (None, "cost"):
        journal_cost.run_generation_bound(report, console, pairs=pairs)
    if only in (None, "crashes"):
        crash_schedules.run(report, console)
    if only in (None, "kills"):
        killed_run.run(report, console)
    if only == "short_answers":
        journal_cost.run_short_answers(report, console, pairs=pairs)
    return report.data
