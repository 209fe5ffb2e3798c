"""Lets several ranks write one folder, which gets its name when all of them are done, or never."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from penstock.errors import UserError
from penstock.records.interfaces import Ranks
from penstock.safe_files import whole_folder


@contextmanager
def joint_folder(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Share the first rank's `whole_folder` with every rank. The folder gets its name when the first rank leaves
    the block: by then the others must have written."""
    if ranks.rank > 0:
        path = bytes(ranks.gather(np.zeros(0, dtype=np.uint8))[0]).decode()
        if not path:
            raise UserError(f"another rank could not make a folder beside {folder}")
        yield Path(path)
        return
    with ExitStack() as stack:
        path = ""
        try:
            unnamed = stack.enter_context(whole_folder(folder))
            path = str(unnamed)
        finally:
            ranks.gather(np.frombuffer(path.encode(), dtype=np.uint8))
        yield unnamed


def agree(ranks: Ranks, work: Callable[[], None]) -> None:
    """Do this rank's part. If any rank fails in its own, all raise, so that none waits for another."""
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    gathered = ranks.gather(np.array([failure is not None]))
    if failure is not None:
        raise failure
    if any(bool(part.any()) for part in gathered):
        raise UserError("another rank could not write its part")
