"""Collects the user's files that workers on other machines need: rewards, workflows and the files that these read.

working directory ─► gather ─► bundles of pieces over the channel ─► a copy beside the worker
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import UserError
from penstock.processes.launchers.node_calls import FilePiece

PIECE = 4 << 20
LEFT_OUT = ("__pycache__", "node_modules", "build", "dist")


@dataclass(frozen=True, slots=True)
class UserFiles:
    """Lists folders of this machine, and which of their files go to other machines."""

    roots: tuple[tuple[Path, tuple[Path, ...]], ...] = ()

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Return each root with the folder that stands for it on other machines."""
        return tuple((str(root), f"files/{number}") for number, (root, _) in enumerate(self.roots))

    def pieces(self) -> Iterator[FilePiece]:
        for number, (root, files) in enumerate(self.roots):
            for file in files:
                path = f"files/{number}/{file.relative_to(root)}"
                with (
                    contextlib.suppress(FileNotFoundError),
                    file.open("rb") as data,
                ):  # it may have been deleted
                    piece, start = data.read(PIECE), 0
                    yield FilePiece(path=path, data=piece)
                    while start := start + len(piece):
                        if not (piece := data.read(PIECE)):
                            break
                        yield FilePiece(path=path, start=start, data=piece)

    def bundles(self) -> Iterator[tuple[FilePiece, ...]]:
        """Yield groups of pieces that travel as one message. A round trip for each of a thousand small files
        would take seconds."""
        bundle: list[FilePiece] = []
        size = 0
        for piece in self.pieces():
            if bundle and size + len(piece.data) > PIECE:
                yield tuple(bundle)
                bundle, size = [], 0
            bundle.append(piece)
            size += len(piece.data)
        if bundle:
            yield tuple(bundle)


def gather(home: Path, others: Sequence[Path], *, left_out: Sequence[Path] = (), max_mb: float) -> UserFiles:
    """Collect the files of the working directory `home`, and of other folders outside it. `UserError` when they
    exceed `max_mb`."""
    home = home.resolve()
    skipped = {path.resolve() for path in left_out}
    roots = [home]
    for other in others:
        folder = other.resolve()
        if folder.is_dir() and not any(folder == root or root in folder.parents for root in roots):
            roots.append(folder)
    sizes: Counter[Path] = Counter()
    gathered = []
    for root in roots:
        files = []
        for file in _files(root, skipped):
            files.append(file)
            _count(sizes, root, file, max_mb)
        gathered.append((root, tuple(files)))
    return UserFiles(tuple(gathered))


def _files(root: Path, skipped: set[Path]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if not _is_left_out(here / name, skipped))
        for name in sorted(files):
            file = here / name
            if not name.startswith(".") and file.is_file():
                yield file


def _is_left_out(folder: Path, skipped: set[Path]) -> bool:
    """Return whether a folder is hidden, a cache, a Python environment or a run folder."""
    name = folder.name
    return (
        name.startswith(".")
        or name in LEFT_OUT
        or name.endswith(".egg-info")
        or folder.resolve() in skipped
        or (folder / "pyvenv.cfg").exists()
    )


def _count(sizes: "Counter[Path]", root: Path, file: Path, max_mb: float) -> None:
    """Add a file's size, and refuse too many megabytes. `sizes` counts by the folders directly below the roots."""
    parts = file.relative_to(root).parts
    with contextlib.suppress(OSError):  # it was deleted meanwhile
        sizes[root / parts[0] if len(parts) > 1 else root] += file.stat().st_size
    if sizes.total() > max_mb * 1e6:
        largest, size = sizes.most_common(1)[0]
        raise UserError(
            f"the files for workers on other machines must have at most launcher.files_mb={max_mb:g} MB, got more, "
            f"of them at least {size / 1e6:.1f} MB in {largest}; start in a smaller folder, or raise "
            "launcher.files_mb"
        )
