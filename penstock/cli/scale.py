"""Changes the number of engines while a run trains: `penstock scale` asks the run for it, `penstock worker`
joins it from another machine."""

import asyncio
import time
from pathlib import Path

from penstock.channel.address import host_and_port
from penstock.cli.samples import run_folder
from penstock.errors import UserError
from penstock.processes.launchers.joining import token_in
from penstock.processes.launchers.node_calls import VOLUNTEER
from penstock.run.engine_fleet import ScaleRequest, read_answer, request_engines
from penstock.run.run_folder import is_held
from penstock.worker.node_agent import attend

ANSWER_S = 30.0
LOOK_AGAIN_S = 0.1


def scale_run(name: str, wish: str) -> str:
    folder, request = run_folder(name), read_wish(wish)
    if not is_held(folder):
        raise UserError(f"{folder} is not running; penstock scale is for a run that trains now")
    request_engines(folder, request)
    return f"{folder}: {_wait_for_answer(folder)}"


def read_wish(wish: str) -> ScaleRequest:
    what, _, count = wish.partition("=")
    if what != "engines" or not (count == "auto" or (count.isdecimal() and int(count) > 0)):
        raise UserError(f"penstock scale takes engines=N with N of at least 1, or engines=auto, got {wish!r}")
    return ScaleRequest(None if count == "auto" else int(count))


def _wait_for_answer(folder: Path) -> str:
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        said = read_answer(folder)
        if said is not None:
            return said
        time.sleep(LOOK_AGAIN_S)
    return "the run has not answered yet; it takes the request when it has time, see its log"


def join_run(address: str, token_file: Path) -> int:
    """Serve a run as an engine until it ends; return the exit code."""
    host, port = host_and_port(address, "--connect")
    token = token_in(token_file, "--token-file")
    print(f"joining the run at {address}", flush=True)
    return asyncio.run(attend(f"tcp:{host}:{port}", VOLUNTEER, token))
