"""An engine's report in Prometheus' text format."""

import re

from penstock.types import EngineReport

HELP = {
    "tokens": "Sampled tokens.",
    "requests": "Generations that were begun.",
    "steps": "Forward passes.",
    "busy_s": "Seconds in which the engine computed.",
    "prefill_tokens": "Prompt tokens that were computed.",
    "cached_tokens": "Prompt tokens that were found in the cache.",
    "preemptions": "Sequences that lost their place in the cache for a while.",
}
GAUGES = ("free_blocks", "num_blocks")


def exposition(report: EngineReport, *, http_requests: int) -> str:
    """Counters end in `_total`, as Prometheus wants it."""
    engine = f'{{engine="{_escaped(report.name)}"}}'
    lines: list[str] = []
    for name, value in sorted(report.counters.items()):
        is_gauge = name in GAUGES
        metric = f"penstock_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}" + ("" if is_gauge else "_total")
        lines += _metric(
            metric, "gauge" if is_gauge else "counter", HELP.get(name, name), [(engine, float(value))]
        )
    gauges = {
        "penstock_running": ("Sequences in the batch.", report.num_running),
        "penstock_waiting": ("Sequences before it.", report.num_waiting),
        "penstock_http_generations": ("Generations that clients wait for.", http_requests),
    }
    for metric, (text, number) in gauges.items():
        lines += _metric(metric, "gauge", text, [(engine, float(number))])
    versions = [
        (f'{{engine="{_escaped(report.name)}",policy="{_escaped(policy)}"}}', float(version))
        for policy, version in report.versions.items()
    ]
    lines += _metric("penstock_version", "gauge", "Version of the weights, by policy.", versions)
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, values: list[tuple[str, float]]) -> list[str]:
    return [
        f"# HELP {name} {text}",
        f"# TYPE {name} {kind}",
        *(f"{name}{at} {_exact(value)}" for at, value in values),
    ]


def _exact(value: float) -> str:
    """All digits: a rate is a difference of counters, which grow far beyond six of them."""
    return str(int(value)) if value.is_integer() else repr(value)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
