"""The worker processes of a run, by name, as Linux lists them."""

from pathlib import Path

PROC = Path("/proc")


def workers_of(controller: int) -> dict[str, int]:
    """Names and process ids of the workers that a controller has now."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and _parent(entry) == controller:
            words = _words(entry)
            if "penstock.worker" in words and "--name" in words:
                found[words[words.index("--name") + 1]] = int(entry.name)
    return found


def _parent(entry: Path) -> int | None:
    try:
        # The name of the program, in brackets, may hold anything.
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):  # it has ended meanwhile
        return None


def _words(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []
