"""The pictures of the learning experiment, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.arms import ROUTER_NOISE, ROUTING_BASELINE, Curve, Setup
from benchmarks.learning.statistics import Estimate, mean_curve
from penstock.errors import MissingExtraError

COLOURS = ("#222222", "#2166ac", "#1b9e77", "#e6a700", "#c0392b")
DPI = 90
SHARES = {"tenth": "a tenth of all choices flipped", "half": "half of all choices flipped"}


def load_pyplot() -> Any:
    """matplotlib without a display; its absence is one sentence."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("bench learning needs matplotlib: pip install 'penstock[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_staleness(
    curves: Mapping[str, Mapping[int, Sequence[Curve]]], setup: Setup, path: Path, titles: Mapping[str, str]
) -> None:
    """Reward against samples, a panel per method, a line per lag."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(
        1, len(curves), figsize=(5.2 * len(curves), 3.8), sharey=True, squeeze=False
    )
    for axis, (method, by_lag) in zip(axes[0], curves.items(), strict=True):
        for colour, (lag, runs) in zip(COLOURS, by_lag.items(), strict=False):
            label = "0 (synchronous)" if lag == 0 else str(lag)
            _band(axis, runs, colour, label)
        _dress(axis, titles[method], setup)
    axes[0][0].legend(title="staleness", frameon=False, loc="lower right")
    axes[0][0].set_ylabel("held-out reward")
    _save(pyplot, figure, path)


def plot_routing(curves: Mapping[str, Sequence[Curve]], setup: Setup, path: Path) -> None:
    """Reward against samples: a panel for each share of flipped choices, a line for each way of treating them."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(ROUTER_NOISE), figsize=(10.4, 3.8), sharey=True)
    for axis, share in zip(axes, ROUTER_NOISE, strict=True):
        names = (ROUTING_BASELINE, f"routing/{share}/replayed", f"routing/{share}/free")
        for colour, name in zip((COLOURS[0], COLOURS[1], COLOURS[4]), names, strict=True):
            _band(axis, curves[name], colour, name.rpartition("/")[2])
        _dress(axis, SHARES[share], setup)
    axes[0].set_ylabel("held-out reward")
    axes[0].legend(title="routers", frameon=False, loc="lower right")
    _save(pyplot, figure, path)


def plot_late(curves: Mapping[str, Sequence[Curve]], setup: Setup, path: Path) -> None:
    """Reward under stragglers for each `staleness.late`: against samples, and against time."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(10.4, 3.8), sharey=True)
    for colour, (late, runs) in zip(COLOURS[1:], curves.items(), strict=False):
        _band(axes[0], runs, colour, late)
        length = min(len(run.ticks) for run in runs)
        ticks = [sum(run.ticks[index] for run in runs) / len(runs) for index in range(length)]
        axes[1].plot(ticks, mean_curve(runs)[1][:length], color=colour, label=late)
    _dress(axes[0], "by samples trained on", setup)
    _dress(axes[1], "by time", setup)
    axes[1].set_xlabel("time, in training steps")
    axes[0].set_ylabel("held-out reward")
    axes[1].legend(title="staleness.late", frameon=False, loc="lower right")
    _save(pyplot, figure, path)


def plot_ratios(ratios: Mapping[str, Mapping[int, Estimate]], path: Path) -> None:
    """Area ratio to synchronous by lag, a line per method, with standard errors."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(5.2, 3.6))
    for colour, (method, by_lag) in zip((COLOURS[1], COLOURS[4], COLOURS[2]), ratios.items(), strict=False):
        lags = list(by_lag)
        axis.errorbar(
            range(len(lags)),
            [by_lag[lag].mean for lag in lags],
            yerr=[by_lag[lag].standard_error for lag in lags],
            color=colour,
            marker="o",
            capsize=3,
            label=method,
        )
        axis.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axis.axhline(1.0, color="#999999", linewidth=0.8)
    axis.set_xlabel("staleness, in updates")
    axis.set_ylabel("area, relative to synchronous")
    axis.legend(title="correction", frameon=False, loc="lower left")
    _save(pyplot, figure, path)


def plot_race(runs: Sequence[Mapping[str, Any]], target: float, path: Path) -> None:
    """Held-out reward against seconds of training, a line per arm and seed."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(5.2, 3.6))
    for colour, arm in ((COLOURS[0], "synchronous"), (COLOURS[1], "asynchronous")):
        for index, run in enumerate(runs):
            label = arm if index == 0 else None
            axis.plot(run[arm]["seconds"], run[arm]["rewards"], color=colour, alpha=0.85, label=label)
    axis.axhline(target, color="#999999", linewidth=0.8, linestyle="--")
    axis.set_xlabel("seconds of training")
    axis.set_ylabel("held-out reward")
    axis.legend(frameon=False, loc="lower right")
    axis.grid(alpha=0.2)
    _save(pyplot, figure, path)


def _band(axis: Any, runs: Sequence[Curve], colour: str, label: str) -> None:
    samples, mean, error = mean_curve(runs)
    axis.plot(samples, mean, color=colour, label=label)
    axis.fill_between(samples, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)


def _dress(axis: Any, title: str, setup: Setup) -> None:
    axis.axhline(setup.target, color="#999999", linewidth=0.8, linestyle="--")
    axis.set_title(title)
    axis.set_xlabel("samples")
    axis.grid(alpha=0.2)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
