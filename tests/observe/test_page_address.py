import pytest

from penstock.errors import UserError
from penstock.observe.page_address import bind, new_token, page_address


def test_an_address_has_the_token_in_its_fragment() -> None:
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        assert page_address(listening, "abc") == f"http://127.0.0.1:{port}/#token=abc"


def test_an_address_of_six_has_brackets() -> None:
    try:
        listening = bind("::1", 0)
    except UserError:
        pytest.skip("this machine has no IPv6")
    with listening:
        assert page_address(listening, "abc").startswith("http://[::1]:")


def test_a_taken_port_is_a_sentence_or_another_port() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"can't be served on 127.0.0.1:{port}: .*; choose another port"):
            bind("127.0.0.1", port)
        with bind("127.0.0.1", port, or_another=True) as other:
            assert other.getsockname()[1] not in (0, port)


def test_tokens_are_long_and_differ() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100 and min(map(len, tokens)) == 32
