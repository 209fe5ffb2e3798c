import socket
import sys

import pytest

from penstock.errors import ConfigError
from penstock.sync import interface
from penstock.sync.interface import address_for_others, address_of, name_of


def test_no_name_is_the_loopback() -> None:
    assert address_of("") == "127.0.0.1"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are looked up on Linux only")
def test_the_loopback_has_a_name_too() -> None:
    assert address_of("lo") == "127.0.0.1"


def test_an_interface_that_is_not_there_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with pytest.raises(ConfigError, match=r"sync\.interface must be .*, got 'eth9'; this one has lo, eth0"):
        address_of("eth9")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are looked up on Linux only")
def test_an_address_has_the_name_of_its_interface() -> None:
    assert [name_of(interface) for interface in ("", "127.0.0.1", "lo", "eth7")] == ["lo", "lo", "lo", "eth7"]
    with pytest.raises(
        ConfigError, match=r"192\.0\.2\.1 is not the address of .* give the name of one of .*lo"
    ):
        name_of("192.0.2.1")


def test_what_listens_on_one_address_is_reached_there() -> None:
    assert address_for_others("10.1.2.3") == "10.1.2.3"
    assert address_for_others("localhost") == "127.0.0.1"


def test_a_name_without_an_address_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(name: str) -> str:
        raise OSError("no such name")

    monkeypatch.setattr(socket, "gethostbyname", nobody)
    with pytest.raises(ConfigError, match=r"launcher\.listen: nowhere\.invalid has no address"):
        address_for_others("nowhere.invalid")


def test_what_listens_everywhere_is_reached_where_this_machine_goes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interface, "ELSEWHERE", ("127.0.0.1", 9))
    assert address_for_others("0.0.0.0") == "127.0.0.1"


def test_without_a_way_out_it_is_a_network_with_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "ELSEWHERE", ("256.0.0.1", 9))  # can't be connected to
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(interface, "address_of", {"lo": "127.0.0.1", "eth0": "10.1.2.3"}.__getitem__)
    assert address_for_others("0.0.0.0") == "10.1.2.3"
