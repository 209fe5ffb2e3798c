"""The live view: a few lines that answer "does it learn, is it fast, who is idle and why"."""

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.observe.plain_text import plain_line
from penstock.observe.status import ProcessStatus, RunStatus

_BARS = "▁▂▃▄▅▆▇█"


class TerminalView:
    """A rich live display below the lasting log lines."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None

    def update(self, status: RunStatus) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(draw(status), refresh=True)

    def log(self, line: str) -> None:
        (self._live.console if self._live is not None else self._console).print(Text(plain_line(line)))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def draw(status: RunStatus) -> RenderableType:
    facts = Table.grid(padding=(0, 3))
    facts.add_row(
        _fact("step", f"{status.step}/{status.steps}"),
        _fact("reward", "–" if status.reward is None else f"{status.reward:.3f}"),
        _fact("held-out", " → ".join(f"{reward:.3f}" for _, reward in status.heldout[-3:]) or "–"),
        _fact("generation", f"{status.tokens_per_s:,.0f} tok/s"),
        _fact("staleness", f"{status.staleness_mean:.2f} (max {status.staleness_max:.0f})"),
        _fact("time", f"{status.elapsed_s:,.0f} s"),
    )
    processes = Table.grid(padding=(0, 2))
    for process in status.processes:
        processes.add_row(Text(process.name), _bar(process), Text(plain_line(process.doing), style="dim"))
    lines: list[RenderableType] = [facts, Text(sparkline(status.rewards), style="green"), processes]
    if status.drops:
        drops = ", ".join(f"{count} {reason}" for reason, count in sorted(status.drops.items()))
        lines.append(Text(f"dropped groups: {drops}", style="yellow"))
    title = Text(f"penstock · {status.name} · {status.phase}")
    return Panel(Group(*lines), title=title, title_align="left")


def sparkline(values: tuple[float, ...], width: int = 60) -> str:
    """The last values as bars between their own bounds, or between 0 and 1 if they lie there."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(0.0, *shown), max(1.0, *shown)
    return "".join(_BARS[min(7, int((value - low) / (high - low) * 8))] for value in shown)


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


def _bar(process: ProcessStatus, width: int = 12) -> Text:
    filled = round(process.busy * width)
    style = "green" if process.busy > 0.5 else "yellow" if process.busy > 0.15 else "red"
    return Text.assemble(("█" * filled, style), ("·" * (width - filled), "dim"), f" {process.busy:4.0%}")
