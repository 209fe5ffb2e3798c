"""Tasks from a `datasets` dataset: a hub name, or a folder or file that `datasets` can read."""

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import MissingExtraError, TaskError


def load_rows(name: str, arguments: dict[str, Any]) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets: tasks need datasets: pip install 'penstock[datasets]'") from error
    options = {"split": "train", **arguments}
    try:
        dataset = datasets.load_dataset(name, **options)
    except Exception as error:  # the library raises a dozen kinds; all mean that the user named it wrongly
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TaskError(f"dataset {name!r} could not be loaded with {options}: {first}") from error
    rows: Iterable[Mapping[str, Any]] = dataset
    return rows
