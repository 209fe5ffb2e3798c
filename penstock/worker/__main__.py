"""Entry of every worker process. It serves every way to start and becomes what it is started as."""

import argparse
import asyncio
import gc
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.channel import Channel, Method
from penstock.channel.address import Hello, connect
from penstock.channel.connection import Req, Res
from penstock.engines.engine_client import START_ENGINE
from penstock.observe.event_queue import EventQueue
from penstock.observe.recorder import Recorder
from penstock.orchestration.launchers.mps import has_own_daemon, quit_orphan
from penstock.orchestration.launchers.private_folder import remove_if_abandoned
from penstock.orchestration.launchers.signals import leave_to_controller
from penstock.orchestration.worker_events import serve_events
from penstock.rollout.rollout_client import START_ROLLOUT
from penstock.scoring.scoring_client import START_SCORING
from penstock.trainer.trainer_client import START_TRAINER
from penstock.worker.bounded_output import bound_prints

LOOKS, LOOK_AGAIN_S = 20, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m penstock.worker", description=__doc__)
    parser.add_argument("--connect", required=True, metavar="ADDRESS", help="unix:/path or tcp:host:port")
    parser.add_argument("--name", required=True)
    options = parser.parse_args()
    leave_to_controller()
    os.umask(0o077)  # what it writes, the model among it, is its owner's
    controller = os.getppid()
    # Not `asyncio.run`, which joins its threads in the end: one may be inside a user's module that never returns.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    code = loop.run_until_complete(
        _serve(options.connect, options.name, os.environ.get("PENSTOCK_TOKEN", ""))
    )
    sys.stdout.flush()
    sys.stderr.flush()
    if has_own_daemon(os.environ) and _outlives(controller):  # or it would have stopped its daemon itself
        quit_orphan(os.environ)
    # A user's reward may hang in a thread and the trainer may be in mid-step: neither may keep an orphan.
    os._exit(code)


def _outlives(controller: int) -> bool:
    """Whether the controller was killed. Its end of the channel closes a little before it is gone."""
    for _ in range(LOOKS):
        if os.getppid() != controller:
            return True
        time.sleep(LOOK_AGAIN_S)
    return False


async def _serve(address: str, name: str, token: str) -> int:
    channel = await connect(address, Hello(name=name, token=token))
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        traceback.print_exception(error, file=sys.__stderr__)
        reading.cancel()

    queue = EventQueue()
    serve_events(channel, queue)
    events = queue.of(name)
    _serve_lazily(channel, START_ENGINE, "penstock.worker.engine_role", fail, events)
    _serve_lazily(channel, START_TRAINER, "penstock.worker.trainer_role", fail, events)
    _serve_lazily(channel, START_ROLLOUT, "penstock.worker.rollout_role", fail, events)
    _serve_lazily(channel, START_SCORING, "penstock.worker.scoring_role", fail, events)
    reading = asyncio.get_running_loop().create_task(channel.run())
    await asyncio.gather(reading, return_exceptions=True)
    if failures:
        return 1
    _sweep(address)
    return 0


def _sweep(address: str) -> None:
    """If the controller was killed, its private folder goes too: it holds weights in memory."""
    kind, _, path = address.partition(":")
    if kind == "unix":
        remove_if_abandoned(Path(path).parent)


def _serve_lazily(
    channel: Channel,
    method: Method[Req, Res],
    module: str,
    fail: Callable[[BaseException], None],
    events: Recorder,
) -> None:
    """Import a role's module only when it is asked for: scoring needs no torch, and starts at once."""

    async def start(request: Req) -> Res:
        import importlib

        if method.name in (START_SCORING.name, START_ROLLOUT.name):  # they run users' code
            bound_prints()
        role = await asyncio.to_thread(importlib.import_module, module)
        begin: Callable[[Channel, Req, Callable[[BaseException], None], Recorder], Awaitable[Res]] = (
            role.start
        )
        answer = await begin(channel, request, fail, events)
        # What start-up made (a million objects of imported libraries) lives as long as the process: the
        # garbage collector need not walk it again and again between two forward passes.
        gc.collect()
        gc.freeze()
        return answer

    channel.serve(method, start)


if __name__ == "__main__":
    main()
