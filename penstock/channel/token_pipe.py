"""Passes the run's token to a new process through its standard input.

Its environment and its command line can be read by every program of the same user, agents among them, for as
long as it lives. A pipe can be read only once.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def token_pipe(token: str) -> Iterator[int]:
    """Yield a descriptor from which one process reads the token as its `stdin`."""
    reading, writing = os.pipe()
    try:
        with open(writing, "wb") as pipe:
            pipe.write(token.encode())
        yield reading
    finally:
        os.close(reading)


def take_token() -> str:
    """Read the token from the standard input, and leave that empty for this process and those that it starts."""
    with open(0, "rb", closefd=False) as pipe:
        token = pipe.read()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return token.decode()
