"""Which files of this machine a run's workers on other machines need: the working directory, the folders of
rewards, workflows and algorithms that lie elsewhere, and a model that is a folder."""

from collections.abc import Iterator
from pathlib import Path

from penstock.orchestration.launchers.user_files import UserFiles, gather
from penstock.orchestration.preflight import Prepared


def files_of_run(prepared: Prepared, home: Path) -> UserFiles:
    config = prepared.config
    return gather(
        home, list(_folders(prepared)), left_out=[config.run.folder], max_mb=config.launcher.files_mb
    )


def _folders(prepared: Prepared) -> Iterator[Path]:
    config = prepared.config
    paths = [function.path for function in config.reward.functions]
    paths += [config.rollout.workflow or "", *config.algorithm.paths()]
    paths += [*config.engine.kinds, config.sync.transport]
    paths += [task.workflow or "" for task in (*prepared.tasks, *prepared.heldout)]
    for path in dict.fromkeys(paths):
        file = path.rpartition(":")[0]
        if file.endswith(".py"):
            yield Path(file).expanduser().parent
    for folder in (prepared.model, config.model.adapter, prepared.merged_adapter):
        if folder and Path(folder).is_dir():
            yield Path(folder)
