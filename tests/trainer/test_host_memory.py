from pathlib import Path

from penstock.trainer.host_memory import available_bytes

MEMINFO = "MemTotal:  800 kB\nMemFree:  10 kB\nMemAvailable:  500 kB\n"


def container(folder: Path, limit: str, held: int) -> Path:
    (folder / "memory.max").write_text(limit)
    (folder / "memory.stat").write_text(f"anon {held}\nfile 999999\n")
    return folder


def test_the_smaller_of_machine_and_container_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    assert available_bytes(meminfo, tmp_path / "none") == 500 * 1024
    assert available_bytes(meminfo, container(tmp_path, "100000", 40000)) == 60000
    assert available_bytes(meminfo, container(tmp_path, "max", 40000)) == 500 * 1024


def test_a_system_that_says_nothing_is_not_guessed(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None
