"""Look-ups on a hub that is not there, that is slow, and that answers."""

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

from penstock.errors import UserError
from penstock.http_server.hub_access import check_hub
from penstock.models.tokenizer import ChatTokenizer, model_context


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said; the process is online before, and as it was after."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return []


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


def test_without_a_hub_there_is_what_is_cached(
    said: list[str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(tiny_model, snapshot)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with listening(monkeypatch):
        pass  # and now nothing listens there
    check_hub("org/tiny", said.append)
    assert ChatTokenizer("org/tiny").encode("7") == ChatTokenizer(str(tiny_model)).encode("7")
    assert model_context("org/tiny") == model_context(str(tiny_model))
    with pytest.raises(UserError, match="'org/other' could not be loaded"):
        model_context("org/other")
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # for the processes of a run
    (line,) = said
    assert line.startswith(f"{constants.ENDPOINT} can't be reached: only models and datasets in the cache")
    check_hub("org/tiny", said.append)
    assert len(said) == 1


def test_a_name_server_that_never_answers_is_not_waited_for(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    until = threading.Event()
    resolving = SimpleNamespace(head=lambda url, timeout: until.wait())
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: resolving)
    check_hub("org/tiny", said.append, connect_s=0.01)
    until.set()
    assert (len(said), constants.is_offline_mode()) == (1, True)


def test_a_hub_that_is_slow_to_answer_is_there(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch):
        check_hub("org/tiny", said.append, connect_s=60)
    assert (said, constants.is_offline_mode()) == ([], False)


def test_a_folder_and_a_set_variable_are_not_looked_up(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_hub(str(tmp_path), said.append)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    check_hub("org/tiny", said.append)
    assert (said, constants.is_offline_mode()) == ([], False)


def test_any_answer_of_the_hub_means_that_it_is_there(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(403)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        check_hub("org/tiny", said.append, connect_s=60)
        answering.join()
    assert (said, len(asked), constants.is_offline_mode()) == ([], 1, False)
