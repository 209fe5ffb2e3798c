"""What happens to the ledger, and to copies of blobs, when records become durable."""

from pathlib import Path

from penstock.buffer.ledger import Ledger, rows_of
from penstock.buffer.ledger_follower import LedgerFollower
from penstock.buffer.life_records import CheckpointKept, GroupDropped, GroupsTrained
from penstock.buffer.lives import Lives
from tests.buffer.test_ledger import admitted, finished


class Copies:
    """Notes what is deleted."""

    def __init__(self) -> None:
        self.deleted: list[int] = []

    def delete(self, numbers: list[int]) -> None:
        self.deleted += numbers


def test_copies_go_with_a_drop_and_with_the_checkpoint_that_covers_their_step(tmp_path: Path) -> None:
    copies = Copies()
    ledger = Ledger(tmp_path / "ledger", Lives(), 0)
    follower = LedgerFollower(ledger, 1, print, copies)  # type: ignore[arg-type]
    follower.committed([admitted(number) for number in range(4)], 1, 1)
    follower.committed([*map(finished, range(4)), GroupDropped(number=1, reason="stale")], 1, 2)
    assert copies.deleted == [1]
    trained = [GroupsTrained(step=step, numbers=(number,)) for step, number in ((1, 0), (2, 2), (3, 3))]
    follower.committed([*trained, CheckpointKept(step=2)], 1, 3)
    assert copies.deleted == [1]
    assert follower.forget_before(2) is None  # all is in the first segment
    assert copies.deleted == [1, 0, 2]
    ledger.close()
    assert [row[2] for row in rows_of(tmp_path / "ledger")] == ["trained", "dropped", "trained", "trained"]
