from pathlib import Path

import pytest

from penstock.durability.run_facts import RunFacts, read_facts, write_facts
from penstock.errors import UserError


def test_facts_come_back_and_a_folder_may_have_none(tmp_path: Path) -> None:
    assert (read_facts(tmp_path).auto, read_facts(tmp_path).trackers) == ((), {})
    facts = RunFacts(auto=("sync.transport",), trackers={"wandb": "ab12"})
    write_facts(tmp_path, facts)
    found = read_facts(tmp_path)
    assert (found.auto, found.trackers) == (facts.auto, facts.trackers)
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o600


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    write_facts(tmp_path, RunFacts())
    assert '"format":2' in (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text('{"format": 1, "auto": "of another shape"}')
    with pytest.raises(UserError, match="has format 1, and this Penstock reads format 2; use the version of"):
        read_facts(tmp_path)


def test_a_broken_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match="can't be read .* remove it to continue without it"):
        read_facts(tmp_path)
