"""How a process that is started gets the run's token: through its standard input.

Its environment and its command line can be read by every program of the same user, agents among them, for as long
as it lives. A pipe can be read once."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def token_pipe(token: str) -> Iterator[int]:
    """A descriptor that gives the token, for `stdin` of one process."""
    reading, writing = os.pipe()
    try:
        with open(writing, "wb") as pipe:
            pipe.write(token.encode())
        yield reading
    finally:
        os.close(reading)


def take_token() -> str:
    """The token in the standard input, which is empty from then on, for what this process starts too."""
    with open(0, "rb", closefd=False) as pipe:
        token = pipe.read()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return token.decode()
