"""Checkpoints, journal and ledger of a run against each other, and against the promise of exactly once."""

from pathlib import Path

from penstock.buffer.durable_log import FOLDER, LEDGER, read_lives
from penstock.buffer.journal.journal_files import DiskFiles
from penstock.buffer.ledger import LedgerCounts, rows_of
from penstock.buffer.lives import Lives
from penstock.buffer.spans import numbers_of
from penstock.errors import PenstockError
from penstock.orchestration.checkpoints import read_progress
from penstock.orchestration.kept_checkpoints import checkpoints_of


def complaints_of(run: Path, *, steps: int | None, groups_per_step: int) -> list[str]:
    """What is wrong with a run that nobody writes to; nothing when every group was trained once.

    None instead of the number of `steps` is for a run that was killed: it may have any, its journal may know of
    more than its checkpoints do, and its ledger, which follows by a second, is not compared."""
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
        lives = read_lives(DiskFiles(run / FOLDER), keeps_content=False)
    except (ValueError, PenstockError) as error:
        return [*complaints, f"the journal can't be read: {error}"]
    complaints += _of_journal(lives, step, consumed)
    if steps is not None:
        complaints += _of_ledger(run / FOLDER / LEDGER, lives, consumed)
    return complaints


def _of_journal(lives: Lives, step: int, consumed: set[int]) -> list[str]:
    if lives.standing.step < step:  # its end was torn off: whoever goes on begins another journal
        return []
    trained = {
        number
        for number, life in lives.by_number.items()
        if life.state == "trained" and life.step is not None and life.step <= step
    }
    if len(trained) + lives.forgotten.trained == len(consumed) and trained <= consumed:
        return []
    num_trained = len(trained) + lives.forgotten.trained
    return [f"the journal has {num_trained} groups trained up to step {step}, the checkpoint {len(consumed)}"]


def _of_ledger(ledger: Path, lives: Lives, consumed: set[int]) -> list[str]:
    complaints = []
    counts = LedgerCounts(ledger).states
    trained = {row[0] for row in rows_of(ledger) if row[2] == "trained"}
    if counts["trained"] != len(consumed) or not trained <= consumed:
        complaints.append(
            f"the ledger has {counts['trained']} groups trained, the checkpoint {len(consumed)}"
        )
    if counts != lives.counts():
        complaints.append(f"the ledger has {_listed(counts)}, the journal {_listed(lives.counts())}")
    return complaints


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in sorted(counts))
