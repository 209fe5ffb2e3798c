from pathlib import Path

import pytest

from penstock.channel.token_file import read_token
from penstock.errors import UserError


def test_a_file_holds_one_token_of_some_length(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(UserError, match="can't be read"):
        read_token(path)
    path.write_text("short\n")
    with pytest.raises(UserError, match="at least 16 characters, got 5"):
        read_token(path)
    path.write_text("0123456789abcdef\n")
    assert read_token(path) == "0123456789abcdef"
