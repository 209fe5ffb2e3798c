"""The `launcher` section: its words, what workers take of a node, and tokens."""

from pathlib import Path

import pytest

from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.errors import ConfigError
from penstock.processes.launchers import worker_kind
from penstock.processes.launchers.config import LauncherConfig
from penstock.processes.launchers.joining import read_token
from penstock.processes.launchers.ray_placer import resources_of


def test_the_kind_may_stand_alone() -> None:
    assert load_config(PenstockConfig, None, ["launcher=ray"]).launcher == LauncherConfig(kind="ray")
    assert load_config(PenstockConfig, None, ["launcher.kind=ray"]).launcher.kind == "ray"
    both = load_config(PenstockConfig, None, ["launcher=ray", "launcher.wait_s=5"]).launcher
    assert (both.kind, both.wait_s) == ("ray", 5.0)
    with pytest.raises(ConfigError, match="launcher"):
        load_config(PenstockConfig, None, ["launcher=slurm"])


def test_who_listens_needs_a_token() -> None:
    load_config(PenstockConfig, None, ["launcher.listen=0.0.0.0:7000", "launcher=ray"])  # it makes one
    for launcher in ("local", "mine.py:NEAR"):
        for listen in ("0.0.0.0:7000", "127.0.0.1:0"):
            with pytest.raises(
                ConfigError, match=f"token_file must name a file .* got listen={listen} without"
            ):
                load_config(PenstockConfig, None, [f"launcher.listen={listen}", f"launcher.kind={launcher}"])
    with pytest.raises(ConfigError, match=r"launcher\.listen must be HOST:PORT, got '7000'"):
        load_config(PenstockConfig, None, ["launcher.listen='7000'", "launcher.token_file=token"])


def test_what_a_worker_takes_of_a_node() -> None:
    config = LauncherConfig(kind="ray", resources={"engine": {"GPU": 2, "spot": 1}})
    assert resources_of(config, ["trainer"], "engine3", 4) == {"GPU": 2, "spot": 1}
    assert resources_of(config, ["trainer"], "trainer", 4) == {"CPU": 4.0, "GPU": 1.0}
    assert resources_of(config, ["trainer"], "scorer12", 1) == {"CPU": 1.0}
    assert worker_kind("engine12") == "engine"


def test_a_token_file_must_be_there_and_hold_something(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    (tmp_path / "empty").write_text("\n")
    assert read_token(LauncherConfig(token_file=str(tmp_path / "token"))) == "abc"
    with pytest.raises(ConfigError, match="must hold a token, and is empty"):
        read_token(LauncherConfig(token_file=str(tmp_path / "empty")))
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_token(LauncherConfig(token_file=str(tmp_path / "none")))
