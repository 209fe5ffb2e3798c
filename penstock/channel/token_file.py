"""The token that clients of a server bring, in a file: a command line is read by everybody on the machine."""

from pathlib import Path

from penstock.errors import UserError

MIN_LENGTH = 16


def read_token(path: Path) -> str:
    """The token in a file; it must have one."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"--token-file {path} can't be read: {error.strerror}") from error
    if len(token) < MIN_LENGTH:
        raise UserError(f"--token-file {path} must hold at least {MIN_LENGTH} characters, got {len(token)}")
    return token
