"""Launchers by name and by path."""

from pathlib import Path

import pytest

from penstock.config import Section
from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.errors import ConfigError, UserError
from penstock.processes.launchers.config import LauncherConfig
from penstock.processes.launchers.launcher_kinds import (
    LAUNCHERS,
    LauncherKind,
    launcher_kind,
    launcher_settings,
)


class Politeness(Section):
    nice: int = 5


FAR = LauncherKind(opener="nowhere:open_far")
NEAR = LauncherKind(opener="nowhere:open_near", on_this_machine=True)
POLITE = LauncherKind(opener="nowhere:open_polite", settings=Politeness)
HERE = "tests.processes.launchers.test_launcher_kinds"


def test_a_kind_says_whether_its_workers_are_on_this_machine() -> None:
    for kind, is_local in (("local", True), ("ray", False), (f"{HERE}:FAR", False), (f"{HERE}:NEAR", True)):
        config = load_config(PenstockConfig, None, [f"launcher={kind}"]).launcher
        assert (config.is_local, config.reaches_other_machines) == (is_local, not is_local)


def test_a_kind_is_one_of_ours_or_a_path() -> None:
    assert launcher_kind("local") is LAUNCHERS["local"]
    assert launcher_kind(f"{HERE}:FAR") is FAR
    with pytest.raises(
        ConfigError, match=r"launcher\.kind must be local, ray or the path of a kind .* got 'slurm'"
    ):
        load_config(PenstockConfig, None, ["launcher=slurm"])
    with pytest.raises(
        UserError, match=r"launcher kind .*:Path' must be a penstock\..*LauncherKind, got <class"
    ):
        launcher_kind(f"{HERE}:Path")


def test_to_read_a_config_executes_no_file_of_the_users(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise RuntimeError('executed')")
    config = load_config(PenstockConfig, None, [f"launcher={file}:MINE", "launcher.files_mb=1"])
    with pytest.raises(UserError, match="RuntimeError: executed"):
        launcher_settings(config.launcher)


def test_a_kind_checks_its_settings() -> None:
    with pytest.raises(ConfigError, match="unknown key 'nice'"):
        launcher_settings(LauncherConfig(settings={"nice": 5}))
    with pytest.raises(
        ConfigError, match=r"^launcher.settings: nice: input should be a valid integer.* got 'very'"
    ):
        launcher_settings(LauncherConfig(kind=f"{HERE}:POLITE", settings={"nice": "very"}))
