"""The GPUs of this machine as the driver's own tool tells them: the controller needs no torch for that, and
makes no CUDA context of its own beside the workers'."""

import importlib.metadata
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

COMMAND = "nvidia-smi"
QUERY = ("--query-gpu=index,uuid,memory.total,memory.free,name", "--format=csv,noheader,nounits")
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU and its memory before the run has taken any."""

    name: str
    total_bytes: int
    free_bytes: int


def find_cards(environ: Mapping[str, str]) -> tuple[Card, ...]:
    """The cards that workers will see, in their order; none where torch was built without CUDA."""
    command = shutil.which(COMMAND, path=environ.get("PATH"))
    if command is None or "+cpu" in importlib.metadata.version("torch"):
        return ()
    try:
        told = subprocess.run(
            [command, *QUERY], capture_output=True, text=True, timeout=30, check=True, env=dict(environ)
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_cards(told, environ.get("CUDA_VISIBLE_DEVICES"))


def parse_cards(told: str, visible: str | None) -> tuple[Card, ...]:
    """Cards from the tool's lines. As CUDA does, `visible` is followed up to its first unknown entry."""
    known: list[tuple[str, str, Card]] = []
    for line in told.splitlines():
        words = [word.strip() for word in line.split(",", 4)]
        if len(words) == 5 and words[2].isdigit() and words[3].isdigit():
            index, uuid, total, free, name = words
            card = Card(name=name, total_bytes=int(total) * MIB, free_bytes=int(free) * MIB)
            known.append((index, uuid, card))
    if visible is None:
        return tuple(card for _, _, card in known)
    chosen: list[Card] = []
    for wanted in visible.split(","):
        found = [card for index, uuid, card in known if _is(wanted.strip(), index, uuid)]
        if not found:
            break
        chosen.append(found[0])
    return tuple(chosen)


def _is(wanted: str, index: str, uuid: str) -> bool:
    return wanted == index or (wanted.startswith("GPU-") and uuid.startswith(wanted))
