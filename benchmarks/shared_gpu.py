"""`python -m benchmarks colocated`: what engine and trainer still do on one GPU, as shares of what each does alone.

Two processes (`benchmarks.shared_gpu_worker`): a real engine that decodes a full batch without end, and the
trainer's forward, backward and update on a packed row. First each alone and both in time slices; then under
MPS, with one side yielding or neither. The headline is the largest sum of the two shares in which neither is
starved.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.shared_gpu_worker import Work
from penstock.bench.child import Child, ChildDied
from penstock.bench.shapes import hardware
from penstock.processes.launchers.mps import Mps, mps

FLOOR = 0.2
"""A side below this share counts as starved."""
SETTLE_S, MEASURE_S = 1.0, 4.0
ROLES = ("engine", "trainer")


@dataclass(frozen=True, slots=True)
class Setting:
    """Under MPS: who yields where kernels of both wait for room on the GPU."""

    yields: str | None = None

    @property
    def name(self) -> str:
        return f"MPS, {self.yields} yields" if self.yields else "MPS"


# In this order each setting shares a process with the one before, which need not start again.
SETTINGS = (Setting("trainer"), Setting(), Setting("engine"))


def on_cpu() -> Work:
    """Small enough for any machine: it shows that the bench works, not what sharing gains."""
    return Work(
        shape="tiny",
        device="cpu",
        batch=8,
        prompt_tokens=8,
        new_tokens=32,
        train_tokens=128,
        train_length=32,
    )


def on_gpu(shape: str = "1.5b", *, compiled: bool = False) -> Work:
    """The engine as in `penstock bench engine`, with room for longer sequences; the trainer on half of the row of
    `penstock bench train`."""
    return Work(
        shape=shape,
        device="cuda",
        batch=512,
        prompt_tokens=64,
        new_tokens=512,
        train_tokens=8192,
        train_length=1024,
        compiled=compiled,
        room_tokens=4096 if shape == "1.5b" else 0,
    )


def run(
    work: Work,
    json_path: Path | None = None,
    *,
    settings: tuple[Setting, ...] | None = None,
    settle_s: float = SETTLE_S,
    measure_s: float = MEASURE_S,
    environ: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """All arms; what is alone is measured once, without MPS. MPS is for GPUs, unless `settings` are given."""
    console = console or Console()
    if settings is None:
        settings = () if work.device == "cpu" else SETTINGS
    inherited = dict(os.environ if environ is None else environ)
    console.print(f"engine and trainer on one {work.device}: {work.shape} …", highlight=False)
    with Pair(work, inherited) as pair:
        pair.ask({role: {} for role in ROLES})
        alone = {role: pair.measure((role,), settle_s, measure_s)[role] for role in ROLES}
        arms = {"time slices": compare(pair.measure(ROLES, settle_s, measure_s), alone)}
    failed: dict[str, str] = {}
    if settings:
        with mps(inherited, console.print) as daemon, Pair(work, inherited) as pair:
            for setting in settings if daemon else ():
                assert daemon is not None
                try:
                    pair.ask(environments(daemon, setting))
                    arms[setting.name] = compare(pair.measure(ROLES, settle_s, measure_s), alone)
                except ChildDied as error:  # what the other arms have shown stays
                    failed[setting.name] = str(error)
                    console.print(f"{setting.name}: {error}", highlight=False, markup=False)
                    pair.close()
    report = {
        "headline": {} if work.device == "cpu" else headline(arms),  # cores are not one GPU
        "hardware": hardware(work.device),
        "setting": msgspec.to_builtins(work),
        "alone": alone,
        "arms": arms,
        "failed": failed,
    }
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    console.print(table(report))
    for name, arm in arms.items():
        if "card_gb" in arm["engine"]:
            console.print(f"{name}: {memory_line(arm)}", highlight=False)
    return report


def memory_line(arm: Mapping[str, Any]) -> str:
    engine, trainer = arm["engine"], arm["trainer"]
    used = max(engine["card_used_gb"], trainer["card_used_gb"])
    return (
        f"engine {engine['peak_gb']:.1f} GB, trainer {trainer['peak_gb']:.1f} GB, "
        f"{used:.1f} of the GPU's {engine['card_gb']:.1f} GB taken"
    )


def environments(daemon: Mps, setting: Setting) -> dict[str, dict[str, str]]:
    return {
        "engine": daemon.environment(yields=setting.yields == "engine"),
        "trainer": daemon.environment(yields=setting.yields == "trainer"),
    }


def compare(both: Mapping[str, Any], alone: Mapping[str, Any]) -> dict[str, Any]:
    """Each side's share of what it does alone, and their sum."""
    shares = {role: both[role]["tokens_per_s"] / alone[role]["tokens_per_s"] for role in ROLES}
    return {
        "generation_share": shares["engine"],
        "training_share": shares["trainer"],
        "sum": sum(shares.values()),
        **both,
    }


def headline(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The best sum among arms in which neither side is starved."""
    fair = [
        arm["sum"] for arm in arms.values() if min(arm["generation_share"], arm["training_share"]) >= FLOOR
    ]
    return {"colocated_sum": max(fair)} if fair else {}


@dataclass
class Pair:
    """One process for each role. A process is replaced when its environment is to change, and only then."""

    work: Work
    inherited: Mapping[str, str]
    processes: dict[str, "Side"] = field(default_factory=dict)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for side in self.processes.values():
            side.close()
        self.processes.clear()

    def ask(self, environments: Mapping[str, Mapping[str, str]]) -> None:
        """Have both, each with these additions to its environment, ready to work."""
        changed = [
            role
            for role in environments
            if role not in self.processes or self.processes[role].additions != environments[role]
        ]
        for role in changed:
            if role in self.processes:
                self.processes.pop(role).close()
        for role in changed:  # at once: both spend most of their start on one core
            self.processes[role] = Side(role, self.work, environments[role], self.inherited)
        for role in changed:
            self.processes[role].read()

    def measure(self, roles: tuple[str, ...], settle_s: float, measure_s: float) -> dict[str, Any]:
        """Rates of these roles while they, and only they, work."""
        sides = {role: self.processes[role] for role in roles}
        tell(sides, b"work")
        for side in sides.values():
            side.read()
        time.sleep(settle_s)
        tell(sides, b"mark")
        time.sleep(measure_s)
        tell(sides, b"report")
        rates = {role: side.read() for role, side in sides.items()}
        tell(sides, b"rest")
        for side in sides.values():
            side.read()
        return rates


class Side(Child):
    """A process that works, with additions to the environment of this one."""

    def __init__(
        self, role: str, work: Work, additions: Mapping[str, str], inherited: Mapping[str, str]
    ) -> None:
        super().__init__(role, "benchmarks.shared_gpu_worker", [role], {**inherited, **additions})
        self.additions = dict(additions)
        self.tell(msgspec.json.encode(work))


def tell(sides: Mapping[str, Side], word: bytes) -> None:
    for side in sides.values():
        side.tell(word)


def table(report: dict[str, Any]) -> Table:
    alone = report["alone"]
    title = (
        f"one {report['hardware']['device']}, {report['setting']['shape']}: shares of what each does alone"
    )
    shown = Table("how", "generation", "training", "sum", "tok/s", "ms a step", "trained tok/s", title=title)
    shown.add_row("alone", "1", "1", "", *_rates(alone))
    for name, arm in report["arms"].items():
        shares = (f"{arm[key]:.2f}" for key in ("generation_share", "training_share", "sum"))
        shown.add_row(name, *shares, *_rates(arm))
    return shown


def _rates(arm: Mapping[str, Any]) -> tuple[str, str, str]:
    engine, trainer = arm["engine"], arm["trainer"]
    return (
        f"{engine['tokens_per_s']:,.0f}",
        f"{engine['step_ms']:.1f}",
        f"{trainer['tokens_per_s']:,.0f}",
    )
