"""Finds the address of a network interface, so that a server listens on this interface alone."""

import contextlib
import fcntl
import socket
import struct
import sys
from collections.abc import Iterator

from penstock.errors import ConfigError

LOOPBACK = "127.0.0.1"
ELSEWHERE = ("192.0.2.1", 9)
"""An address that is reserved for documentation and belongs to no machine."""
_SIOCGIFADDR = 0x8915
"""Linux's ioctl for the IPv4 address of an interface."""


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface of this machine, by its name. "" is the loopback, and an address
    is returned as it is."""
    if not interface:
        return LOOPBACK
    if _is_address(interface):
        return interface
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


def name_of(interface: str) -> str:
    """Return the name of the interface that `address_of` resolves, for software that accepts only names."""
    if interface and not _is_address(interface):
        return interface
    address = address_of(interface)
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ConfigError):
            if address_of(name) == address:
                return name
    raise ConfigError(
        f"sync.interface={interface} is not the address of a network interface of this machine; give the name of "
        f"one of {', '.join(name for _, name in socket.if_nameindex())}"
    )


def address_for_others(host: str) -> str:
    """Return the IPv4 address under which other machines reach a listener on `host`. For a listener on all
    addresses (`0.0.0.0`) that is the address of outgoing connections."""
    if host not in ("0.0.0.0", "::", "*"):
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            raise ConfigError(f"launcher.listen: {host} has no address: {error}") from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(ELSEWHERE)  # sends nothing
        except OSError:  # there is no route to the internet, but perhaps one to neighbours
            return next((address for address in _own_addresses() if not address.startswith("127.")), LOOPBACK)
        return str(asking.getsockname()[0])


def _own_addresses() -> Iterator[str]:
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ConfigError):
            yield address_of(name)


def _is_address(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, text)
    except OSError:
        return False
    return True
