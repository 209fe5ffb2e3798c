"""The main plots of a report as pictures, by matplotlib (`penstock[plots]`)."""

from pathlib import Path

from penstock.errors import MissingExtraError
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.report.report_curves import Plot, plots_of
from penstock.observe.report.svg_plots import COLOURS

FOLDER = "report"


def write_pngs(run: RunReading, folder: Path | None = None) -> list[Path]:
    """One file a plot."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("pictures of plots need matplotlib: pip install 'penstock[plots]'") from error
    matplotlib.use("Agg")
    folder = folder or run.folder / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    return [_write(plot, folder) for plot in plots_of(run)] + _time_shares(run, folder)


def _write(plot: Plot, folder: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for place, curve in enumerate(plot.curves):
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(
            curve.x, curve.y, color=colour, marker="o" if curve.dots else None, markersize=3, label=curve.name
        )
        if curve.low:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
    if len(plot.curves) > 1:
        axes.legend(frameon=False, fontsize=8)
    axes.set_title(plot.title, fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.grid(alpha=0.3)
    path = folder / f"{plot.file}.png"
    figure.savefig(path, dpi=150)
    return path


def _time_shares(run: RunReading, folder: Path) -> list[Path]:
    from matplotlib.figure import Figure

    sheet = run.time_sheet()
    if not sheet:
        return []
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(sheet)), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(name for one in sheet for name in one.parts))
    left = [0.0] * len(sheet)
    for place, name in enumerate(names):
        widths = [one.shares.get(name, 0.0) for one in sheet]
        axes.barh(
            [one.process for one in sheet], widths, left=left, color=COLOURS[place % len(COLOURS)], label=name
        )
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    axes.set_title("Where the time went", fontsize=10)
    path = folder / "time.png"
    figure.savefig(path, dpi=150)
    return [path]
