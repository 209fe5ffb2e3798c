"""Loads tasks with `datasets`: from a hub name, or from a folder or file that the library can read."""

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import MissingExtraError, TaskError
from penstock.tasks.sources import first_line


def load_rows(name: str, arguments: dict[str, Any]) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets: tasks need datasets: pip install 'penstock[datasets]'") from error
    if not name:
        raise TaskError("datasets: must be followed by a dataset's name, as in datasets:openai/gsm8k")
    options = {"split": "train", **arguments}
    try:
        dataset = datasets.load_dataset(name, **options)
    except Exception as error:  # the library raises a dozen kinds; all mean wrong settings
        raise TaskError(
            f"dataset {name!r} could not be loaded with {options}: {first_line(error)}"
        ) from error
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise TaskError(f"dataset {name!r} needs one split in tasks.arguments, it has: {', '.join(dataset)}")
    rows: Iterable[Mapping[str, Any]] = dataset
    return rows
