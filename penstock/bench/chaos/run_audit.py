"""Audits the checkpoints and the journal of a run against each other: each group must be trained exactly once."""

from pathlib import Path

from penstock.durability.checkpoints import read_progress
from penstock.durability.durable_log import FOLDER, read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.errors import PenstockError
from penstock.loop.attempts import Attempts
from penstock.loop.spans import numbers_of


def complaints_of(run: Path, *, steps: int | None, groups_per_step: int) -> list[str]:
    """Return what is wrong with a run that no process writes to: nothing, if every group was trained once.

    `steps` is None for a run that was killed: it may have any number of steps, and its journal may be ahead
    of its checkpoints.
    """
    found = checkpoints_of(run)
    if not found:
        return [] if steps is None else ["there is no checkpoint"]
    step, checkpoint = list(found.items())[-1]
    consumed = numbers_of(read_progress(checkpoint).consumed)
    complaints = []
    if steps is not None and step != steps:
        complaints.append(f"the last checkpoint is of step {step}, not {steps}")
    if len(consumed) != step * groups_per_step:
        complaints.append(f"{len(consumed)} groups were consumed in {step} steps of {groups_per_step}")
    try:
        attempts = read_attempts(DiskFiles(run / FOLDER), keeps_content=False)
    except (ValueError, PenstockError) as error:
        return [*complaints, f"the journal can't be read: {error}"]
    return complaints + _of_journal(attempts, step, consumed, is_whole=steps is not None)


def _of_journal(attempts: Attempts, step: int, consumed: set[int], *, is_whole: bool) -> list[str]:
    if attempts.standing.step < step:  # its end was torn off: a resumed run begins another journal
        return [f"the journal ends at step {attempts.standing.step}"] if is_whole else []
    trained = {
        number
        for number, one in attempts.by_number.items()
        if one.step is not None and (is_whole or one.step <= step)
    }
    num_trained = len(trained) + attempts.forgotten.trained
    if num_trained == len(consumed) and trained <= consumed:
        return []
    return [f"the journal has {num_trained} groups trained up to step {step}, the checkpoint {len(consumed)}"]
