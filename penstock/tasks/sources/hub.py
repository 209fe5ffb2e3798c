"""`datasets:NAME`: a dataset of the Hugging Face hub, or a folder that `datasets` can read."""

from penstock.errors import MissingExtraError, TaskError
from penstock.tasks.config import TasksConfig
from penstock.tasks.rows import task_of_row
from penstock.types import Task


def load(name: str, config: TasksConfig) -> list[Task]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            f"tasks from 'datasets:{name}' need datasets: pip install 'penstock[datasets]'"
        ) from error
    if not name:
        raise TaskError("'datasets:' must be followed by a dataset's name, as in datasets:openai/gsm8k")
    try:
        dataset = datasets.load_dataset(name, config.subset, split=config.split, **config.args)
    except Exception as error:
        # datasets raises whatever its readers raise: for a user they all mean that the dataset is not there.
        raise TaskError(
            f"the dataset {name!r} (subset {config.subset!r}, split {config.split!r}) could not be loaded: "
            f"{_first_line(error)}"
        ) from error
    if config.limit is not None:
        dataset = dataset.select(range(min(config.limit, len(dataset))))
    return [
        task_of_row(row, default_id=f"{name}:{index}", where=f"datasets:{name}, row {index}", config=config)
        for index, row in enumerate(dataset)
    ]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
