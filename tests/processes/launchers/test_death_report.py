import signal
from pathlib import Path

import pytest

from penstock.processes.launchers import death_report
from penstock.processes.launchers.death_report import (
    MAX_LINE,
    NUM_LAST_LINES,
    OUT_OF_MEMORY,
    LastLines,
    count_oom_kills,
    death_of,
)


@pytest.mark.parametrize(
    ("code", "how", "out_of_memory"),
    [
        (1, "ended with exit code 1", False),
        (OUT_OF_MEMORY, "ran out of memory", True),
        (-signal.SIGKILL, "was killed by SIGKILL, as the machine ran out of memory", True),
        (-signal.SIGSEGV, "was killed by SIGSEGV", False),
        (
            -signal.SIGXCPU,
            "was killed by SIGXCPU: it used more CPU time than its call may (reward.cpu_s, rollout.cpu_s)",
            False,
        ),
    ],
)
def test_how_a_worker_ended_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, how: str, out_of_memory: bool
) -> None:
    monkeypatch.setattr(death_report, "count_oom_kills", lambda: 8)
    log = tmp_path / "scorer0.log"
    log.write_text("".join(f"line {number}\n" for number in range(50)))
    death = death_of("scorer0", 12, code, log, oom_kills=7)
    assert str(death) == f"worker scorer0 (pid 12) {how}; its log is {log}"
    assert death.out_of_memory is out_of_memory
    assert death.detail == "".join(f"line {number}\n" for number in range(10, 50))


def test_a_kill_while_nothing_was_killed_for_memory_is_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(death_report, "count_oom_kills", lambda: 7)
    death = death_of("engine0", 12, -signal.SIGKILL, tmp_path / "none", oom_kills=7)
    assert str(death).startswith("worker engine0 (pid 12) was killed by SIGKILL; its log")
    assert not death.out_of_memory


def test_linux_counts_what_it_killed(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 3\noom_kill 5\npgfault 9\n")
    assert count_oom_kills(tmp_path / "vmstat") == 5
    assert count_oom_kills(tmp_path / "none") == 0


@pytest.mark.parametrize("piece", [1, 3, 7, 10_000])
def test_the_last_lines_of_an_output_do_not_depend_on_its_pieces(piece: int) -> None:
    output = b"".join(b"line %d\n" % number for number in range(100)) + b"no end"
    last = LastLines()
    for start in range(0, len(output), piece):
        last.add(output[start : start + piece])
    assert last.text() == "".join(f"line {number}\n" for number in range(61, 100)) + "no end"


def test_a_line_without_an_end_takes_no_more_memory_than_a_long_line() -> None:
    last = LastLines()
    last.add(b"first\n")
    for _ in range(100):
        last.add(b"x" * 1000)
    assert last.text() == "first\n" + "x" * MAX_LINE
    last.add(b"\n" * (NUM_LAST_LINES + 1))
    assert last.text() == "\n" * NUM_LAST_LINES
