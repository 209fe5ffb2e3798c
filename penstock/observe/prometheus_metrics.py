"""Formats a run's state as Prometheus text, for scrapers of a dashboard's `/metrics`."""

import math
from collections.abc import Iterable, Mapping

from penstock.observe.run_state import RunState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def prometheus_text(state: RunState) -> str:
    """Return all numbers, each labelled with the run's name. Numbers that are not known yet are left out."""
    run = {"run": state.name}
    status = state.status()
    lines: list[str] = []

    def tell(
        name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float | None]]
    ) -> None:
        known = [(labels, value) for labels, value in samples if value is not None and not math.isnan(value)]
        if known:
            lines.append(f"# HELP penstock_{name} {text}")
            lines.append(f"# TYPE penstock_{name} {kind}")
            lines.extend(
                f"penstock_{name}{_labels({**run, **labels})} {_number(value)}" for labels, value in known
            )

    tell("step", "gauge", "The last optimizer step.", [({}, float(state.step))])
    tell("steps_planned", "gauge", "Steps that the run is to make.", [({}, float(state.steps_planned))])
    tell("samples_total", "counter", "Episodes trained on.", [({}, float(state.num_samples))])
    tell("reward", "gauge", "Mean training reward of the last steps.", [({}, status.reward)])
    heldout = state.heldout[-1][1] if state.heldout else None
    tell("heldout_reward", "gauge", "The last held-out evaluation.", [({}, heldout)])
    tell("tokens_per_second", "gauge", "Tokens that engines generate.", [({}, status.tokens_per_s)])
    tell(
        "staleness_mean",
        "gauge",
        "Mean age in steps of the last step's tokens.",
        [({}, status.staleness_mean)],
    )
    bound = None if status.staleness_bound is None else float(status.staleness_bound)
    tell("staleness_bound", "gauge", "The bound of that age.", [({}, bound)])
    drops = [({"reason": reason}, float(count)) for reason, count in sorted(state.drops.items())]
    tell("dropped_groups_total", "counter", "Groups that were not trained.", drops)
    failures = [({"reason": reason}, float(count)) for reason, count in sorted(state.failures.items())]
    tell("failed_episodes_total", "counter", "Episodes that failed.", failures)
    busy = [({"process": process.name}, process.busy) for process in status.processes]
    tell("busy_ratio", "gauge", "Share of the last seconds in which a process worked.", busy)
    if status.flow is not None:
        flow = status.flow
        stages = {
            "generating": flow.generating,
            "scoring": flow.scoring,
            "ready": flow.ready,
            "limit": flow.limit,
        }
        groups = [({"stage": stage}, float(count)) for stage, count in stages.items()]
        tell("groups", "gauge", "Groups on their way to a step.", groups)
    metrics = [({"name": name}, value) for name, value in sorted(state.row.items())]
    tell("metric", "gauge", "Metrics of the last step, by their names in metrics.jsonl.", metrics)
    return "\n".join(lines) + "\n" if lines else ""


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
