import socket
import sys

import pytest

from penstock.errors import ConfigError
from penstock.sync.interface import address_of


def test_no_name_is_the_loopback() -> None:
    assert address_of("") == "127.0.0.1"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are looked up on Linux only")
def test_the_loopback_has_a_name_too() -> None:
    assert address_of("lo") == "127.0.0.1"


def test_an_interface_that_is_not_there_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with pytest.raises(ConfigError, match=r"sync\.interface must be .*, got 'eth9'; this one has lo, eth0"):
        address_of("eth9")
