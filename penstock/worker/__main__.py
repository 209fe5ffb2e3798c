"""Starts a worker process, which connects to its controller and becomes what its first message says."""

import argparse
import asyncio
import faulthandler
import gc
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.channel import Channel, Method
from penstock.channel.address import connect, incarnation_name
from penstock.channel.connection import Req, Res
from penstock.channel.token_pipe import take_token
from penstock.engines.engine_start import START_ENGINE
from penstock.errors import PenstockError
from penstock.observe.event_queue import EventQueue
from penstock.observe.pulse import LONG_S
from penstock.observe.recorder import Recorder
from penstock.processes.launchers.death_report import OUT_OF_MEMORY
from penstock.processes.launchers.memory_limit import limit_memory
from penstock.processes.launchers.mps import has_own_daemon, quit_orphan
from penstock.processes.launchers.private_folder import remove_if_abandoned
from penstock.processes.launchers.signals import STACKS, leave_to_controller
from penstock.processes.worker_events import serve_events
from penstock.rollout.rollout_process import START_ROLLOUT
from penstock.scoring.scoring_process import START_SCORING
from penstock.trainer.trainer_start import START_TRAINER
from penstock.worker.bounded_output import bound_prints
from penstock.worker.moved_request import moved
from penstock.worker.out_of_memory import is_out_of_memory
from penstock.worker.priority import RaisedPriority

LOOKS, LOOK_AGAIN_S = 20, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m penstock.worker", description=__doc__)
    parser.add_argument("--connect", required=True, metavar="ADDRESS", help="unix:/path or tcp:host:port")
    parser.add_argument("--name", required=True)
    parser.add_argument("--incarnation", type=int, default=1, help="which process of this name it is")
    parser.add_argument(
        "--moved", default="{}", help="folders of the controller, and their copies here, as JSON"
    )
    options = parser.parse_args()
    token = take_token()
    first = RaisedPriority()  # until it has started
    leave_to_controller()
    gc.disable()  # until it has started: libraries make a million objects, and the collector would walk them
    faulthandler.register(STACKS, all_threads=True)  # into its log, even while its event loop is blocked
    limit_memory(os.environ)
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # core dumps hold weights
    os.umask(0o077)  # files that it writes, such as the model, are readable by their owner alone
    controller = os.getppid()
    # Not `asyncio.run`, which joins its threads in the end: one may be inside a user's module that never returns.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    arriving = incarnation_name(options.name, options.incarnation)
    code = loop.run_until_complete(
        _serve(options.connect, options.name, arriving, token, json.loads(options.moved), first)
    )
    sys.stdout.flush()
    sys.stderr.flush()
    if has_own_daemon(os.environ) and _outlives(controller):  # a living controller stops its daemon itself
        quit_orphan(os.environ)
    # A user's reward may hang in a thread, or the trainer be in mid-step: neither may keep this process alive.
    os._exit(code)


def _outlives(controller: int) -> bool:
    """Return whether the controller was killed. Its end of the channel closes shortly before the process is
    gone."""
    for _ in range(LOOKS):
        if os.getppid() != controller:
            return True
        time.sleep(LOOK_AGAIN_S)
    return False


async def _serve(
    address: str, name: str, arriving: str, token: str, places: dict[str, str], first: RaisedPriority
) -> int:
    try:
        channel = await connect(address, arriving, token)
    except (OSError, PenstockError) as error:  # the controller may have been killed: no traceback
        print(f"worker {name} can't reach its controller, so it ends: {error}", file=sys.__stderr__)
        return 1
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        traceback.print_exception(error, file=sys.__stderr__)
        reading.cancel()

    queue = EventQueue()
    serve_events(channel, queue)
    events = queue.of(name)
    _serve_lazily(channel, START_ENGINE, "penstock.worker.engine_role", fail, events, places, first)
    _serve_lazily(channel, START_TRAINER, "penstock.worker.trainer_role", fail, events, places, first)
    _serve_lazily(channel, START_ROLLOUT, "penstock.worker.rollout_role", fail, events, places, first)
    _serve_lazily(channel, START_SCORING, "penstock.worker.scoring_role", fail, events, places, first)
    reading = asyncio.get_running_loop().create_task(channel.run())
    await asyncio.gather(reading, return_exceptions=True)
    if failures:
        return OUT_OF_MEMORY if is_out_of_memory(failures[0]) else 1
    _sweep(address)
    return 0


def _sweep(address: str) -> None:
    """Remove the controller's private folder if it was killed, because it holds weights in memory."""
    kind, _, path = address.partition(":")
    if kind == "unix":
        remove_if_abandoned(Path(path).parent)


def _serve_lazily(
    channel: Channel,
    method: Method[Req, Res],
    module: str,
    fail: Callable[[BaseException], None],
    events: Recorder,
    places: dict[str, str],
    first: RaisedPriority,
) -> None:
    """Serve a role whose module is imported on demand: scoring needs no torch, and so starts at once."""

    async def start(request: Req) -> Res:
        import importlib

        if method.name in (START_SCORING.name, START_ROLLOUT.name):  # they run users' code
            bound_prints()
        with events.pulse.phase("starting", LONG_S):
            role = await asyncio.to_thread(importlib.import_module, module)
            begin: Callable[[Channel, Req, Callable[[BaseException], None], Recorder], Awaitable[Res]] = (
                role.start
            )
            here = moved(request, places, channel.local_host)
            answer = await begin(channel, here, fail, events)
        # The million objects of imported libraries live as long as the process, so the garbage collector need
        # not walk them again and again between two forward passes.
        gc.collect()
        gc.freeze()
        gc.enable()
        first.end()
        return answer

    channel.serve(method, start)


if __name__ == "__main__":
    main()
