"""Breaks the connection of a running worker from outside: its own socket, through Linux's `pidfd_getfd`."""

import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

PIDFD_GETFD = 438
"""The system call; the C library has no name for it yet."""
CONTROLLER_SOCKET = "controller"
"""How the file of the socket is called that a controller listens on."""


def cut_off(pid: int) -> int:
    """Shut down every connection of this process to a controller; how many there were."""
    process = os.pidfd_open(pid)
    try:
        num_broken = 0
        for copy in _sockets(pid, process):
            with copy:
                if _reaches_controller(copy):
                    copy.shutdown(socket.SHUT_RDWR)
                    num_broken += 1
        return num_broken
    finally:
        os.close(process)


def _sockets(pid: int, process: int) -> Iterator[socket.socket]:
    """Copies of the sockets that it has open, for the caller to close."""
    libc = ctypes.CDLL(None, use_errno=True)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if _is_socket(entry):
            copy = libc.syscall(PIDFD_GETFD, process, int(entry.name), 0)
            if copy >= 0:
                yield socket.socket(fileno=copy)


def _is_socket(entry: Path) -> bool:
    try:
        return os.readlink(entry).startswith("socket:")
    except OSError:  # it was closed meanwhile
        return False


def _reaches_controller(one: socket.socket) -> bool:
    try:
        return one.family == socket.AF_UNIX and Path(one.getpeername()).name == CONTROLLER_SOCKET
    except (OSError, TypeError):  # it is not connected, or its peer has no path
        return False
