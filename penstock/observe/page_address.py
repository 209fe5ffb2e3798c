"""Opens the listening socket of a run's web page, and makes the address that a person opens."""

import secrets
import socket

from penstock.errors import UserError

WAITING = 128
"""Connections that may wait while the page's process starts."""


def new_token() -> str:
    return secrets.token_urlsafe(24)


def page_address(listening: socket.socket, token: str) -> str:
    """Return the address of the page. The token is in its fragment, which browsers never send."""
    host, port = listening.getsockname()[:2]
    named = f"[{host}]" if ":" in host else host
    return f"http://{named}:{port}/#token={token}"


def bind(host: str, port: int, *, or_another: bool = False) -> socket.socket:
    """Return a listening socket; with `or_another`, on a free port if this one is taken."""
    try:
        return _listening(host, port)
    except OSError as error:
        if not or_another:
            raise UserError(
                f"the page can't be served on {host}:{port}: {error.strerror or error}; choose another port"
            ) from error
    try:
        return _listening(host, 0)
    except OSError as error:
        raise UserError(f"the page can't be served on {host}: {error.strerror or error}") from error


def _listening(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(WAITING)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening
