"""Checks everything that can be checked before anything heavy starts: files, names, prompts, extras.

A mistake is a `UserError` in one sentence, raised before any process has been started.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.algorithms.selection import SELECTIONS
from penstock.config.root import PenstockConfig
from penstock.config.unresolved import AUTO
from penstock.demo.model import RECIPES, open_builtin
from penstock.durability.checkpoints import Part
from penstock.durability.run_facts import read_facts, write_facts
from penstock.engines.kinds import kind_of
from penstock.errors import UserError
from penstock.http_server.hub_access import check_hub
from penstock.models.support import RawConfig, load_config, read_config
from penstock.models.tokenizer import ChatTokenizer, check_prompts, model_context, warn_of_unknown_characters
from penstock.observe.events import ConfigEvent, RunEvent
from penstock.observe.run_state import RunState
from penstock.observe.store.event_store import EventStore, budgets
from penstock.observe.writers import MetricsWriter, Tracker, check_writers, make_writers
from penstock.placement.automatic import check_transport, sites_of
from penstock.placement.gpu_pools import used_gpus
from penstock.placement.gpus import Gpu, why_missing
from penstock.placement.memory_plan import MemoryPlan
from penstock.placement.placed_config import outline_on_gpu, place, resolve_adapter
from penstock.placement.refusals import check_capabilities, check_model, check_num_ranks
from penstock.processes.launchers.launcher_kinds import launcher_settings
from penstock.processes.launchers.user_files import UserFiles, gather
from penstock.records import Task
from penstock.rollout.workflow import Workflow, Workflows, load_workflow
from penstock.run.run_folder import SavedRun, shown, write_config
from penstock.scoring.functions import load_functions
from penstock.tasks.config import TasksConfig
from penstock.tasks.curriculum import load_curriculum
from penstock.tasks.sources import load_tasks
from penstock.tasks.task_rows import Row, resolve_chat, take_rows, tasks_from_rows
from penstock.usercode import is_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Holds a run that is checked and may start."""

    config: PenstockConfig
    model: str
    tokenizer: ChatTokenizer
    tasks: list[Task]
    heldout: list[Task]
    folder: Path
    max_context: int
    gpus: tuple[Gpu, ...] = ()
    """The GPUs of this machine, as they were before the run."""
    workflow: Workflow | None = None
    """The workflow that `rollout.workflow` names, or one that only this process has; None is a single turn."""
    merged_adapter: str = ""
    """The adapter that engines merge into the model when they load it; "" where a trainer publishes one."""
    memory: MemoryPlan | None = None
    """How the engines' GPU is shared out; None on a CPU."""
    saved: SavedRun | None = None
    """The saved run to resume; None: this run is new."""
    only_in_python: tuple[Part, ...] = ()
    """Parts that the caller passed as Python objects and the config can't name."""
    chosen: tuple[str, ...] = ()
    """Settings that were `auto`."""

    def user_files(self, home: Path) -> UserFiles:
        """Collect what workers on other machines need.

        That is the working directory, the folders of rewards, workflows and algorithms outside it, and a
        model that is a folder.
        """
        config = self.config
        paths = [function.path for function in config.reward.functions]
        paths += [config.rollout.workflow or "", *config.algorithm.paths()]
        paths += [*config.engine.kinds, config.sync.transport]
        paths += [task.workflow or "" for task in (*self.tasks, *self.heldout)]
        files = [path.rpartition(":")[0] for path in dict.fromkeys(paths)]
        folders = [Path(file).expanduser().parent for file in files if file.endswith(".py")]
        models = (self.model, config.model.adapter, self.merged_adapter)
        folders += [Path(model) for model in models if model and Path(model).is_dir()]
        return gather(home, folders, left_out=[config.run.folder], max_mb=config.launcher.files_mb)


def prepare(
    config: PenstockConfig,
    *,
    tasks: Iterable[Row] | None = None,
    heldout: Iterable[Row] | None = None,
    log: Callable[[str], None],
    cache: Path,
    gpus: tuple[Gpu, ...] = (),
    workflow: Workflow | None = None,
    saved: SavedRun | None = None,
) -> Prepared:
    """Load and check tasks, model name, tokenizer, prompts, rewards, workflows and extras, then make the run
    folder.

    A `saved` run resumes in its own folder. Rows and a `workflow` of the caller override those that the
    config names.
    """
    given: dict[Part, bool] = {
        "tasks": tasks is not None or heldout is not None,
        "workflow": workflow is not None and config.rollout.workflow is None,
    }
    check_writers(config.observe)
    if saved is None:
        check_parent(config.run.folder)
    _check_config(config, gpus)
    train_tasks = _tasks(config.tasks, tasks, log)
    heldout_tasks = [] if config.eval.tasks is None else _tasks(config.eval.tasks, heldout, log)
    load_functions(config.reward)
    config.algorithm.load()
    launcher_settings(config.launcher)  # loads a launcher that is named by path
    load_curriculum(config.tasks.curriculum, train_tasks)
    if workflow is None and config.rollout.workflow is not None:
        workflow = load_workflow(config.rollout.workflow, config.rollout.http)
    if given["workflow"]:
        _refuse_commands([*train_tasks, *heldout_tasks])
    is_single_turn = not Workflows().check([*train_tasks, *heldout_tasks]) and workflow is None
    warn_of_idle_penalty(config, log)
    model, tokenizer, max_context = open_model(config, log=log, cache=cache)
    check_model(config, load_config(model, trust_remote_code=config.model.trust_remote_code), gpus)
    tokenizer.check_pad_token(log)
    has_weights = saved is not None and saved.checkpoint is not None
    config, adapter = resolve_adapter(config, model, saved=has_weights, log=log)
    config, train_tasks, heldout_tasks = resolve_prompts(
        config, train_tasks, heldout_tasks, has_template=tokenizer.has_template, log=log
    )
    _refuse_shared(train_tasks, heldout_tasks)
    warn_of_unknown_characters([task.prompt for task in (*train_tasks, *heldout_tasks)], tokenizer, log)
    new_tokens = config.rollout.max_new_tokens
    longest = max(
        check_prompts(some, tokenizer, max_context=max_context, max_new_tokens=new_tokens)
        for some in (train_tasks, heldout_tasks)
    )
    longest += new_tokens
    if not is_single_turn and config.engine.max_context:
        longest = max_context  # what a workflow appends between turns is not known before it runs
    placed = place(
        config, model, outline_on_gpu(config, model, gpus, adapter), gpus, longest=longest, log=log
    )
    config = placed.config
    check_capabilities(config, gpus=gpus)  # also of what was `auto`
    if config.run.deterministic and (placed.is_on_gpu or not is_single_turn):
        needed = "answers of one turn" if not is_single_turn else "a CPU: set model.device=cpu"
        raise UserError(f"run.deterministic=true needs {needed}")
    folder = new_run_folder(config) if saved is None else saved.folder
    if config.launcher.reaches_other_machines:
        folder = folder.resolve()  # workers elsewhere have another working directory
    facts = read_facts(folder)
    known = facts.id or ("" if saved is None else saved.progress.run) or secrets.token_hex(8)
    write_facts(folder, msgspec.structs.replace(facts, auto=placed.chosen, id=known))
    return Prepared(
        config=config,
        model=model,
        tokenizer=tokenizer,
        tasks=train_tasks,
        heldout=heldout_tasks,
        folder=folder,
        max_context=max_context,
        gpus=gpus,
        workflow=workflow,
        memory=placed.memory,
        saved=saved,
        only_in_python=tuple(part for part, is_given in given.items() if is_given),
        chosen=placed.chosen,
    )


def open_model(
    config: PenstockConfig, *, log: Callable[[str], None], cache: Path
) -> tuple[str, ChatTokenizer, int]:
    """Return the model's path, its tokenizer, and how long its sequences may be."""
    trusted = config.model.trust_remote_code
    model = open_builtin(config.model.name, cache, log=log)
    check_hub(model, log)
    max_context = min(
        config.engine.max_context or sys.maxsize, model_context(model, trust_remote_code=trusted)
    )
    tokenizer = ChatTokenizer(
        model,
        pad_token=config.model.pad_token,
        trust_remote_code=trusted,
        template_args=config.tasks.template_args,
    )
    return model, tokenizer, max_context


def _check_config(config: PenstockConfig, gpus: Sequence[Gpu]) -> None:
    """Refuse what the config and the model's `config.json` rule out, before tasks are read or torch is imported."""
    check_devices(config, gpus)
    check_num_ranks(config, gpus)
    check_capabilities(config, gpus=gpus)
    if config.sync.transport != AUTO:
        check_transport(config, sites_of(config, gpus))  # loads one that is named by path
    if (known := _known_config(config.model.name)) is not None:
        check_model(config, known, gpus)


def _known_config(name: str) -> RawConfig | None:
    """Return what the model's config says before it is loaded, or made."""
    if name not in RECIPES:
        return read_config(name)
    num_experts = getattr(RECIPES[name], "num_experts", 0)
    dense = RawConfig(model_type="llama")
    return RawConfig(model_type="qwen3_moe", num_experts=num_experts) if num_experts else dense


def resolve_prompts(
    config: PenstockConfig,
    tasks: Sequence[Task],
    heldout: Sequence[Task],
    *,
    has_template: bool,
    log: Callable[[str], None],
) -> tuple[PenstockConfig, list[Task], list[Task]]:
    """Return the config and the tasks with prompts as the model expects them. Logs when strings became chat
    messages."""
    train_tasks, section = resolve_chat(tasks, config.tasks, has_template=has_template)
    heldout_tasks, update = list(heldout), {}
    if config.eval.tasks is not None:
        heldout_tasks, of_heldout = resolve_chat(heldout, config.eval.tasks, has_template=has_template)
        update = {"tasks": of_heldout}
    count = sum(
        after.is_chat and not before.is_chat
        for before, after in zip((*tasks, *heldout), (*train_tasks, *heldout_tasks), strict=True)
    )
    if count:
        log(
            f"the model has a chat template: {count:,} string prompts became user messages "
            "(tasks.as_chat=false leaves them as they are)"
        )
    resolved = config.model_copy(update={"tasks": section, "eval": config.eval.model_copy(update=update)})
    return resolved, train_tasks, heldout_tasks


def check_devices(config: PenstockConfig, gpus: Sequence[Gpu]) -> None:
    """Refuse a GPU that this machine lacks, where all workers are on it."""
    if config.launcher.reaches_other_machines:
        return
    devices = {"model.device": config.model.device, "reward.device": config.reward.device}
    if kind_of(config.engine.kind).computes_here:
        devices["engine.device"] = config.engine.device
    for setting, device in devices.items():
        if (why := why_missing(device, gpus)) is not None:
            raise UserError(f"{setting}={device} {why}")


def _tasks(config: TasksConfig, rows: Iterable[Row] | None, log: Callable[[str], None]) -> list[Task]:
    if rows is None:
        return load_tasks(config, log)
    return tasks_from_rows(take_rows(rows, "tasks", config.limit, log), config)


def warn_of_idle_penalty(config: PenstockConfig, log: Callable[[str], None]) -> None:
    """Warn when no single answer can be long enough for `overlong_penalty`; workflows of several turns may be."""
    arguments = config.algorithm.selection.get("overlong_penalty")
    if arguments is None:
        return
    values = {**SELECTIONS.parameters("overlong_penalty"), **arguments}
    starts = values["max_length"] - values["margin"]
    if starts >= config.rollout.max_new_tokens:
        log(
            f"algorithm.selection.overlong_penalty begins at {starts:g} tokens (max_length - margin), and answers "
            f"have at most rollout.max_new_tokens={config.rollout.max_new_tokens}: it never acts; lower max_length"
        )


def new_run_folder(config: PenstockConfig) -> Path:
    """Make `runs/NAME`, or `runs/NAME-2` and so on: a run never writes into another one's folder."""
    check_parent(config.run.folder)
    try:
        config.run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.folder={config.run.folder} can't be made: {error.strerror}") from error
    number = 1
    while True:
        name = config.run.name if number == 1 else f"{config.run.name}-{number}"
        folder = config.run.folder / name
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise UserError(f"the run folder {folder} can't be made: {error.strerror}") from error
        write_config(folder, config)
        return folder


def check_parent(folder: Path) -> None:
    """Refuse a `run.folder` where it or one of its parents is not a folder."""
    for part in (folder, *folder.parents):
        rule = "must be a folder" if part == folder else "must lie in a folder"
        if os.path.isdir(part):
            return
        if os.path.exists(part):
            raise UserError(f"run.folder {rule}, and {part} is a file; name another one")
        if os.path.islink(part):
            raise UserError(
                f"run.folder {rule}, and {part} is a link to {part.readlink()}, which is not there; is a disk not "
                "mounted?"
            )


def open_writers(prepared: Prepared) -> list[MetricsWriter]:
    """Open the metric writers. Trackers of a resumed run continue the run that they already know."""
    folder = prepared.folder
    facts = read_facts(folder)
    writers = make_writers(prepared.config.observe, folder, folder.name, facts.trackers)
    known = {writer.name: writer.run_id for writer in writers if isinstance(writer, Tracker)}
    write_facts(folder, msgspec.structs.replace(facts, trackers=facts.trackers | known))
    return writers


def open_store(prepared: Prepared, state: RunState) -> EventStore:
    section = prepared.config.observe
    kept = budgets(samples_mb=section.samples_mb, tokens_mb=section.tokens_mb, spans_mb=section.spans_mb)
    return EventStore(prepared.folder, state, kept)


def run_event(prepared: Prepared, now: float) -> RunEvent:
    folder, saved = prepared.folder, prepared.saved
    return RunEvent(
        process="controller",
        time=now,
        name=folder.name,
        folder=str(folder),
        steps=prepared.config.run.steps,
        wall_s=time.time(),
        step=0 if saved is None else saved.progress.step,
        heldout=() if saved is None else saved.progress.rewards,
    )


def config_event(prepared: Prepared, now: float) -> ConfigEvent:
    """Build the event that shows readers the config, as in `config.yaml`, with secrets hidden."""
    config = prepared.config
    sites = sites_of(config, prepared.gpus)
    used = used_gpus(config) or {site.device for site in (sites.trainer, sites.engine) if site.is_gpu}
    return ConfigEvent(process="controller", time=now, config=json.dumps(shown(config)), num_gpus=len(used))


def _refuse_commands(tasks: Sequence[Task]) -> None:
    """Refuse tasks with commands beside a workflow that only this process has: then there are no rollout
    workers, which commands need."""
    for task in tasks:
        if task.workflow is not None and is_command(task.workflow):
            raise UserError(
                f"the workflow of task {task.id!r} is a command, which needs rollout workers, and none can load "
                "the run's workflow, since it exists only in this process; put that into a module and name it by "
                "path (rollout.workflow=file.py:function)"
            )


def _refuse_shared(train: Sequence[Task], heldout: Sequence[Task]) -> None:
    """Refuse prompts that are both in training and held out: the evaluation would measure memory."""
    shared = {task.prompt for task in train} & {task.prompt for task in heldout}
    if shared:
        raise UserError(
            f"{len(shared)} prompts are both in tasks and in eval.tasks; held-out prompts must not be "
            "trained on"
        )
