"""Defines the arguments that several commands take."""

import os
from pathlib import Path
from typing import Annotated

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value …")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")]


def file_and_words(config: str | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """Split the config file from the overrides: a first argument that is no file but has a `=` is an override."""
    words = list(overrides or [])
    if config is not None and "=" in config and not os.path.exists(config):
        return None, [config, *words]
    return (None if config is None else Path(config)), words
