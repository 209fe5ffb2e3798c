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


def test_a_text_is_shown_without_the_secrets_that_are_in_it() -> None:
    arguments = {"token": "s3cret", "nested": {"password": 12345}, "size": 7}
    assert without_secrets("401 for s3cret, 12345 and 7", arguments) == "401 for ***, *** and 7"
    assert without_secrets("1 of 1", {"token": "1"}) == "1 of 1"


def test_a_config_with_hidden_values_can_not_be_run() -> None:
    refuse_hidden({"tasks": {"arguments": {"token": "x"}}})
    with pytest.raises(ConfigError, match=r"tasks\.arguments\.token is hidden .*; give it again"):
        refuse_hidden({"tasks": {"arguments": {"token": HIDDEN}}})
