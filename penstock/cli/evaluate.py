"""Runs `penstock eval`: mean reward and pass@k of a model, or of a run's newest one, on held-out tasks."""

import asyncio
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.api import DEMO, cache_folder
from penstock.cli.export import find_model, to_stderr
from penstock.config.loader import apply_override, build, read_yaml
from penstock.config.root import PenstockConfig
from penstock.demo.model import RECIPES
from penstock.errors import PenstockError, UserError
from penstock.models.adapter_folder import is_adapter, read_adapter
from penstock.placement.gpus import find_gpus
from penstock.run.evaluation_session import (
    EvaluationReport,
    evaluate,
    prepare_evaluation,
    report_of,
)
from penstock.run.run_folder import check_config


def evaluation_config(
    model: str, config: Path | None, overrides: Sequence[str], *, tasks: str | None, samples: int | None
) -> PenstockConfig:
    """Return the config to evaluate with: `config`, else a run's own, the demo's for a built-in model, or the
    defaults. For an adapter, of a run or saved by peft, it names the base model and the adapter beside it."""
    found, run = find_model(model, to_stderr)
    if config is None and run is not None:
        check_config(run)
        config = run / "config.yaml"
    if config is None and model in RECIPES:
        config = DEMO
    data: dict[str, Any] = read_yaml(config) if config is not None else {}
    for override in overrides:
        apply_override(data, override)
    data["model"] = _model_section(data.get("model") or {}, Path(found))
    section = data["eval"] = dict(data.get("eval") or {})
    if tasks is not None:
        section["tasks"] = {"source": tasks}
    if samples is not None:
        section["samples"] = samples
    return build(PenstockConfig, data)


def _model_section(section: Mapping[str, Any], model: Path) -> dict[str, Any]:
    if not is_adapter(model):
        return {**section, "name": str(model), "lora": None, "adapter": None}
    base = read_adapter(model).base or section.get("name")
    if base is None:
        raise UserError(f"{model} does not say which model it is an adapter of; give one: model.name=NAME")
    return {**section, "name": base, "lora": None, "adapter": str(model)}


def evaluate_model(config: PenstockConfig, *, correct: float) -> EvaluationReport:
    with tempfile.TemporaryDirectory(prefix="penstock-eval-") as folder:
        prepared = prepare_evaluation(
            config,
            folder=Path(folder),
            log=to_stderr,
            cache=cache_folder(),
            gpus=find_gpus(os.environ),
        )
        to_stderr(f"evaluating {prepared.merged_adapter or prepared.model} on {len(prepared.heldout)} tasks")
        rewards = asyncio.run(evaluate(prepared, to_stderr))
    report = report_of(rewards, samples=config.eval.samples, correct=correct)
    if report.num_failed:
        to_stderr(f"{report.num_failed} tasks could not be scored, the first since {report.failure}")
    if not report.num_tasks:
        raise PenstockError("no task could be scored, so there is no mean")
    return report


def print_report(report: EvaluationReport, model: str, *, correct: float) -> None:
    table = Table(
        title=Text(f"penstock eval · {model}"), title_justify="left", show_header=False, min_width=60
    )
    error = "" if math.isnan(report.error) else f" ± {report.error:.3f}"
    table.add_row("mean reward", f"{report.reward:.3f}{error}")
    for k, share in report.pass_at.items():
        table.add_row(f"pass@{k}", f"{share:.3f}")
    table.add_row("correct is", f"a reward of at least {correct:g}")
    table.add_row("tasks, answers", f"{report.num_tasks:,}, {report.num_answers:,}")
    if report.num_failed:
        table.add_row("tasks without a score", f"{report.num_failed:,}")
    Console().print(table)
