"""The address of a network interface: what listens for other machines listens there, and nowhere else."""

import fcntl
import socket
import struct
import sys

from penstock.errors import ConfigError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Linux' call for the IPv4 address of an interface."""


def address_of(interface: str) -> str:
    """The IPv4 address of an interface of this machine, by its name; "" is the loopback."""
    if not interface:
        return LOOPBACK
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        raise ConfigError(
            f"sync.interface must be a network interface of every machine, got {interface!r}; this one has "
            f"{', '.join(known)}"
        )
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"sync.interface={interface} is understood on Linux only; leave it empty for the loopback"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError as error:
            raise ConfigError(
                f"sync.interface={interface} has no IPv4 address; choose another one"
            ) from error
    return socket.inet_ntoa(answer[20:24])
