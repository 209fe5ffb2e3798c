"""Paths of the controller's machine become those of the copies, where there are some."""

from pathlib import Path

from penstock.engines.engine_start import EngineStart
from penstock.scoring.scoring_process import ScoringStart
from penstock.worker.moved_request import moved


def test_paths_with_a_copy_are_moved_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("")
    start = ScoringStart(
        reward={"functions": [{"path": "/home/me/reward.py:one"}, {"path": "/home/me/gone.py:two"}]},
        search_path=("/home/me", "/home/men"),
    )
    here = moved(start, {"/home/me": str(tmp_path)})
    assert here.reward["functions"] == [
        {"path": f"{tmp_path}/reward.py:one"},
        {"path": "/home/me/gone.py:two"},
    ]
    assert here.search_path == (str(tmp_path), "/home/men")


def test_an_empty_interface_becomes_the_address_that_the_controller_sees() -> None:
    start = EngineStart(name="engine0", model="m", device="cpu", threads=1, config={"interface": ""})
    assert moved(start, {}, "10.0.0.7").interface == "10.0.0.7"
    assert moved(start, {}, "10.0.0.7").config == {"interface": ""}
    assert moved(start, {}, "127.0.0.1").interface == ""
    named = EngineStart(name="engine0", model="m", device="cpu", threads=1, config={}, interface="eth1")
    assert moved(named, {}, "10.0.0.7").interface == "eth1"
