"""Reads a server's token from a file, since every user of the machine can read a command line."""

from pathlib import Path

from penstock.errors import UserError

MIN_LENGTH = 16


def read_token(path: Path) -> str:
    """Return the token in a file, or raise `UserError`."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"--token-file {path} can't be read: {error.strerror}") from error
    if len(token) < MIN_LENGTH:
        raise UserError(f"--token-file {path} must hold at least {MIN_LENGTH} characters, got {len(token)}")
    return token
