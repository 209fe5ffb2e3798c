from typing import Any

import pytest

from penstock.config.secrets import HIDDEN, hidden, is_secret, refuse_hidden, without_secrets
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "hf_token",
        "API_KEY",
        "apikey",
        "api-key",
        "openai_api_key",
        "password",
        "client_secret",
        "auth",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["pad_token", "max_new_tokens", "micro_batch_tokens", "keys", "author", "name"]
)
def test_names_that_only_look_like_them(name: str) -> None:
    assert not is_secret(name)


def test_values_under_such_names_are_hidden_at_any_depth() -> None:
    data = {
        "a": {"token": "s3cret", "size": 3, "inner": [{"password": {"x": 1}}]},
        "pad_token": "<pad>",
        "token": None,
    }
    assert hidden(data) == {
        "a": {"token": HIDDEN, "size": 3, "inner": [{"password": HIDDEN}]},
        "pad_token": "<pad>",
        "token": None,
    }


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ({"a": [["x"], {"keys": [{"api_key": "s"}]}]}, {"a": [["x"], {"keys": [{"api_key": HIDDEN}]}]}),
        ({"tokens": {"hf_token": ["s", "t"]}}, {"tokens": {"hf_token": HIDDEN}}),
        ({"password": 12345}, {"password": HIDDEN}),
        ({"url": "https://me:s3cret@host:80/a?b=c"}, {"url": "https://me:***@host:80/a?b=c"}),
        (["redis://:s3cret@host"], ["redis://:***@host"]),
        ({"url": "http://host/?a=1&api_key=s&b=2"}, {"url": "http://host/?a=1&api_key=***&b=2"}),
        ({"url": "http://host:80/@me?max_tokens=3#a:b@c"}, {"url": "http://host:80/@me?max_tokens=3#a:b@c"}),
        ({"machine.py:my_token": "s"}, {"machine.py:my_token": HIDDEN}),
    ],
)
def test_secrets_are_hidden_wherever_they_are(data: Any, shown: Any) -> None:
    assert hidden(data) == shown


def test_names_of_functions_are_no_secrets_where_only_texts_are() -> None:
    data = {
        "truncated_token": {"cap": 2.0},
        "mine.py:my_token": {"on": True, "api_key": "s3cret", "key_token": ["s"]},
        "token": 3,
    }
    assert hidden(data, only_texts=True) == {
        "truncated_token": {"cap": 2.0},
        "mine.py:my_token": {"on": True, "api_key": HIDDEN, "key_token": HIDDEN},
        "token": 3,
    }


def test_a_text_is_shown_without_the_secrets_that_are_in_it() -> None:
    arguments = {"token": "s3cret", "nested": {"password": 12345}, "size": 7}
    assert without_secrets("401 for s3cret, 12345 and 7", arguments) == "401 for ***, *** and 7"
    assert without_secrets("1 of 1", {"token": "1"}) == "1 of 1"
    urls = {"urls": ["https://me:s3cret@host", "http://host?token=abcde&size=12345"]}
    assert without_secrets("s3cret, abcde, 12345", urls) == "***, ***, 12345"


def test_a_config_with_hidden_values_can_not_be_run() -> None:
    refuse_hidden({"tasks": {"arguments": {"token": "x"}}})
    with pytest.raises(ConfigError, match=r"tasks\.arguments\.token is hidden .*; give it again"):
        refuse_hidden({"tasks": {"arguments": {"token": HIDDEN}}})
    with pytest.raises(
        ConfigError, match=r"^tasks\.arguments\.urls\[1\] has a hidden part .*; give it again"
    ):
        refuse_hidden({"tasks": {"arguments": {"urls": ["a", "https://me:***@host"]}}})
    with pytest.raises(ConfigError, match=r"^a\[0\]\.token is hidden"):
        refuse_hidden({"a": [{"token": HIDDEN}]})
