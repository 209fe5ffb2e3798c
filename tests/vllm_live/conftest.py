"""One server for all tests that can share one. They join it by its URL, and leave it with the weights it had."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.demo.model import ensure_builtin_model
from penstock.engines.vllm.server_process import ServerSettings
from tests.vllm_live.live import ADAPTER_RANK, CONTEXT, is_healthy

START_S = 400.0


@pytest.fixture(scope="session")
def vllm(request: pytest.FixtureRequest) -> str:
    """The program that starts vLLM."""
    command: str | None = request.config.getoption("--vllm")
    if command is None:
        pytest.skip("needs --vllm PATH (make live-vllm)")
    return command


@pytest.fixture(scope="session")
def model(vllm: str) -> str:
    """The demo's model. vLLM's kernels for CPUs want heads of at least 32."""
    return str(ensure_builtin_model(Path.home() / ".cache" / "penstock"))


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, vllm: str, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a server with a context of `CONTEXT` tokens."""
    given: str | None = request.config.getoption("--vllm-url")
    if given is not None:
        yield given
        return
    with serving(ServerSettings(model=model, command=vllm, max_context=CONTEXT), tmp_path_factory) as url:
        yield url


@pytest.fixture(scope="session")
def adapter_server(
    request: pytest.FixtureRequest, vllm: str, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The same, with room for adapters."""
    given: str | None = request.config.getoption("--vllm-lora-url")
    if given is not None:
        yield given
        return
    settings = ServerSettings(model=model, command=vllm, max_context=CONTEXT, adapter_rank=ADAPTER_RANK)
    with serving(settings, tmp_path_factory) as url:
        yield url


def serving(settings: ServerSettings, folders: pytest.TempPathFactory) -> "Serving":
    return Serving(settings, folders.mktemp("vllm"))


class Serving:
    """A `vllm serve` that lives as long as the block."""

    def __init__(self, settings: ServerSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder

    def __enter__(self) -> str:
        import os

        socket = self._folder / "s"
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                self._settings.argv(socket),
                env={**os.environ, **self._settings.environment()},
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + START_S
        while not is_healthy(socket):
            if self._process.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise RuntimeError((self._folder / "log").read_text()[-3000:])
            time.sleep(0.5)  # a server announces nothing
        return f"unix:{socket}"

    def __exit__(self, *failure: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
