"""A wish for another number of engines, and the run's answer: two small files in the run folder. They work
for whoever sees the folder, from any machine, and need no port."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from penstock.safe_files import write_private

REQUEST, ANSWER = "scale.json", "scale.answer.json"


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    engines: int | None
    """None leaves it to the controller again."""


def ask(folder: Path, request: ScaleRequest) -> None:
    (folder / ANSWER).unlink(missing_ok=True)
    write_private(folder / REQUEST, json.dumps({"engines": request.engines}))


def take(folder: Path) -> ScaleRequest | None:
    """For the run: what was asked since the last time. Something else in the file is nothing, and so is a file that
    can't be read or removed: a wish ends no run."""
    path = folder / REQUEST
    try:
        data = path.read_bytes()
        path.unlink(missing_ok=True)
        engines = json.loads(data)["engines"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if engines is not None and (not isinstance(engines, int) or engines < 1):
        return None
    return ScaleRequest(engines)


def answer(folder: Path, line: str) -> None:
    with contextlib.suppress(OSError):  # who asked looks at the run itself
        write_private(folder / ANSWER, json.dumps({"answer": line}))


def read_answer(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / ANSWER).read_text())["answer"])
    except (OSError, ValueError, KeyError):
        return None
