"""Reads and writes `run.json`: what a run folder must hold besides its config so that another process can resume
the run."""

from pathlib import Path

import msgspec

from penstock.errors import UserError
from penstock.records import Record
from penstock.safe_files import write_private

FILE = "run.json"
FORMAT = 2
"""The format of run folders: which files there are and what they mean. Other numbers are refused."""


class RunFacts(Record, frozen=True, kw_only=True):
    """Holds what is known when a run begins. Everything else is in checkpoints."""

    format: int = FORMAT
    auto: tuple[str, ...] = ()
    """Settings that `auto` chose. They are chosen again when the run resumes, perhaps on another machine."""
    id: str = ""
    """A random id, drawn when the run began: its checkpoints say which run they belong to."""
    trackers: dict[str, str] = msgspec.field(default_factory=dict)
    """The ids of the run at wandb and trackio, with which it continues there too."""


class _Format(msgspec.Struct):
    format: int = FORMAT


def read_facts(run: Path) -> RunFacts:
    """Read the facts of a run folder; defaults without the file. Another format is refused."""
    path = run / FILE
    try:
        data = path.read_bytes()
        number = msgspec.json.decode(data, type=_Format).format
        if number == FORMAT:
            return msgspec.json.decode(data, type=RunFacts)
    except FileNotFoundError:
        return RunFacts()
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} can't be read ({error}); remove it to continue without it") from error
    raise UserError(
        f"the run folder {run} has format {number}, and this Penstock reads format {FORMAT}; use the version of "
        "Penstock that wrote it"
    )


def write_facts(run: Path, facts: RunFacts) -> None:
    write_private(run / FILE, msgspec.json.encode(facts).decode() + "\n")
