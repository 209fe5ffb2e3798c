import errno
import os
from functools import partial
from pathlib import Path

from penstock.observe.events import RecoveryEvent
from penstock.observe.writers.buffered_lines import BufferedLines
from penstock.observe.writers.recoveries_jsonl import NAME, RecoveriesWriter, read_recoveries
from tests.observe.examples import ONE_OF_EACH


def test_recoveries_are_kept_and_read_back_without_a_line_that_was_cut(tmp_path: Path) -> None:
    writer = RecoveriesWriter(tmp_path)
    assert read_recoveries(tmp_path) == []
    for event in ONE_OF_EACH:
        writer.on(event)
    writer.close()
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"type": "RecoveryEvent", "worker": "eng')
    (told,) = read_recoveries(tmp_path)
    assert (told.worker, told.incarnation, told.took_s) == ("engine0", 2, 3.5)


def test_a_full_disk_delays_a_line_until_there_is_room_for_it(tmp_path: Path) -> None:
    is_full = True

    def write(file: int, data: bytearray) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(file, data)

    writer = RecoveriesWriter(tmp_path, open_lines=partial(BufferedLines, write=write))
    recovery = next(event for event in ONE_OF_EACH if isinstance(event, RecoveryEvent))
    other = next(event for event in ONE_OF_EACH if not isinstance(event, RecoveryEvent))
    writer.on(recovery)
    assert read_recoveries(tmp_path) == []
    is_full = False
    writer.on(other)
    assert len(read_recoveries(tmp_path)) == 1
    writer.close()
