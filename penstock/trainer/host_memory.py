"""How much of the host's memory this process may still take."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = MEMINFO, group: Path = GROUP) -> int | None:
    """None where the system does not say. A container's limit counts too."""
    known = [size for size in (_of_machine(meminfo), _of_container(group)) if size is not None]
    return min(known, default=None)


def _of_machine(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    kilobytes = sizes.get("MemAvailable", "").split()
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _of_container(folder: Path) -> int | None:
    """Its limit, less what its processes hold. Cached files are not held: they give way."""
    try:
        limit = int((folder / "memory.max").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return limit - int(counts.get("anon", 0))
