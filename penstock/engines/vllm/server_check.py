"""Checks at the start that a server is there, new enough, has RL routes, and serves the trained model."""

import asyncio
import contextlib
import re
from collections.abc import Mapping
from typing import Any

from penstock.engines.vllm.server_client import GENERATE, ServerClient
from penstock.errors import EngineLost, PenstockError, UserError

SAMPLE = "Both 3 and 7 are prime: 3 + 7 = 10."
"""The text that both tokenizers must encode alike."""
HOW = "see docs/engines.md for how to start it"
ROUTES = (
    *("/weight_info", "/pause", "/resume", "/collective_rpc", "/update_weight_version"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
)
"""The routes that weight updates need. vLLM has all of them since `NEEDED`."""


async def check_routes(client: ServerClient) -> None:
    """Raise `UserError` unless the server answers and has every route that an engine needs."""
    url = client.url
    try:
        healthy = await client.status("GET", "/health")
    except EngineLost as error:
        raise UserError(
            f"engine.vllm.urls: there is no server at {url}; start it, or correct the URL"
        ) from error
    if healthy != 200:
        raise UserError(f"engine.vllm.urls: the server at {url} is not healthy (it answers {healthy}); {HOW}")
    if await client.status("POST", GENERATE, {}) == 403:
        raise UserError(f"the server at {url} has no {GENERATE}: start it with --enable-scale-out; {HOW}")
    await _check_has(client, GENERATE)
    if await client.status("GET", "/is_paused") == 404:
        raise UserError(
            f"the server at {url} has its RL routes off: start it with VLLM_SERVER_DEV_MODE=1; {HOW}"
        )
    for route in ROUTES:
        await _check_has(client, route)


async def describe(client: ServerClient) -> dict[str, Any]:
    """Ask the server's workers about the model that they serve. Raise `UserError` unless weights come through
    our plugin."""
    try:
        (first, *_) = await client.ask_workers("penstock_describe")
    except (PenstockError, ValueError) as error:
        raise UserError(
            f"the vLLM at {client.url} does not know penstock: install penstock beside it, and start it with "
            "--worker-extension-cls penstock.vllm_plugin.worker_extension.PenstockWorker"
        ) from error
    if first.get("transfer") != "penstock":
        raise UserError(
            f"the vLLM at {client.url} does not take weights through penstock's plugin: start it with "
            '--weight-transfer-config \'{"backend": "penstock"}\''
        )
    return first


def check_sizes(url: str, served: Mapping[str, Any], trained: Mapping[str, Any], *, model: str) -> None:
    """Raise `UserError` if served and trained model differ in a size that both know."""
    for name, size in served.items():
        mine = trained.get(name)
        if mine is not None and mine != size:
            raise UserError(
                f"the server at {url} serves another model than {model}: its {name} is {size}, and the trainer's "
                f"is {mine}; start it with the model that is trained"
            )


def check_experts(url: str, described: Mapping[str, Any]) -> None:
    """Raise `UserError` unless the server's answers include the experts of their tokens."""
    if not described.get("returns_experts"):
        raise UserError(
            f"the server at {url} does not return the experts that it chooses: start it with "
            "--enable-return-routed-experts (on a GPU), or set engine.record_routing=off to train without them"
        )


async def check_tokenizer(client: ServerClient, expected: list[int], *, model: str) -> None:
    """Raise `UserError` unless the server encodes `SAMPLE` as `expected`, the trainer's ids."""
    answer = await client.post("/tokenize", {"prompt": SAMPLE, "add_special_tokens": False})
    if answer["tokens"] != expected:
        raise UserError(
            f"the server at {client.url} has another tokenizer than {model}: for {SAMPLE!r} it says "
            f"{answer['tokens'][:8]} …, and the trainer's says {expected[:8]} …; start it with the model that is "
            "trained"
        )


async def served_context(client: ServerClient) -> int:
    """Return the longest sequence that the server supports."""
    answer = await client.get("/v1/models")
    return int(answer["data"][0]["max_model_len"])


async def _check_has(client: ServerClient, route: str) -> None:
    """Raise `UserError` if the server lacks a route. An unknown method gets status 404 only where the route is
    missing."""
    if await client.status("OPTIONS", route) == 404:
        raise UserError(
            f"vLLM {await _version(client)} at {client.url} is too old: it has no {route}, and {NEEDED} has; "
            "update it"
        )


async def _version(client: ServerClient) -> str:
    try:
        return str((await client.get("/version"))["version"])
    except (PenstockError, KeyError, TypeError):
        return "of unknown version"


NEEDED = "0.32"
"""The first vLLM with every route and flag that the engine uses."""
ASK_S = 120.0
"""Time limit for `vllm --version`, which loads all of vLLM."""


async def too_old(command: str) -> str:
    """Return the version of vLLM that `command` starts if it is too old. Otherwise, or if it is unknown, return "".

    This is called when a server has ended before it answered, because a server that is too old does not know our
    flags.
    """
    process = await asyncio.create_subprocess_exec(
        command,
        "--version",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), ASK_S)
    except TimeoutError:
        return ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    found = re.search(r"\d+\.\d+(\.\d+)?", said.decode(errors="replace"))
    return found.group() if found is not None and _numbers(found.group()) < _numbers(NEEDED) else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
