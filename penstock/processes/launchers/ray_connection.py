"""Connects a driver to a Ray cluster, as one of its nodes or from outside through its head's client server.

Also defines the actor that Ray runs on a node: it starts a node agent and reports how that ended. The actor is sent
by value and uses only the standard library, so that a node without Penstock can report that Penstock is missing.
"""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.errors import ConfigError, MissingExtraError

AUTH_MODE = "RAY_AUTH_MODE"
CLIENT = "ray://"
"""The prefix of a cluster's address for a machine that is no node of it."""
NO_CLIENT_SERVER = ("Starting Ray client server failed", "Proxy failed to Connect to backend")
"""Ray's messages when the process dies that its head forks for an outside driver: gRPC's threads may end it before
it has begun (https://github.com/ray-project/ray/issues/63202)."""
NUM_TRIES = 3


def connect_to_ray(address: str, environ: Mapping[str, str], log: Callable[[str], None]) -> str:
    """Connect this process to a cluster, and return this machine's address as the cluster sees it."""
    try:
        import ray
        from ray import cloudpickle
    except ImportError as error:
        raise MissingExtraError("launcher.kind=ray needs ray: pip install 'penstock[ray]'") from error

    logging.getLogger("ray").setLevel(logging.ERROR)  # its messages would appear between ours
    for tries_left in reversed(range(NUM_TRIES)):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
            break
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            why = _why_not(address, environ, error)
            if not (tries_left and _is_unlucky(error)):
                raise ConfigError(why) from error
            log(f"WARNING: {why}; trying again")
            ray.shutdown()
        except ImportError as error:
            raise MissingExtraError(
                f"launcher.address={address} needs Ray's client: pip install 'ray[client]', here and on the head"
            ) from error
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # of `PlacingActor`
    if environ.get(AUTH_MODE) != "token":
        log(
            "WARNING: this Ray cluster has no token authentication: anyone who reaches its ports can run code on "
            "its nodes; start every node, and this run, with RAY_AUTH_MODE=token (docs/cluster.md)"
        )
    if address.startswith(CLIENT):
        return _address_towards(address.removeprefix(CLIENT))
    return str(ray.util.get_node_ip_address())


def _address_towards(there: str) -> str:
    """Return the address of this machine, which is no Ray node, on the network by which it reaches `HOST:PORT`."""
    host, _, port = there.partition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, int(port or 10001)))  # sends nothing
        return str(asking.getsockname()[0])


def _is_unlucky(error: Exception) -> bool:
    return any(words in str(error) for words in NO_CLIENT_SERVER)


def _why_not(address: str, environ: Mapping[str, str], error: Exception) -> str:
    text = str(error)
    if "ersion mismatch" in text:
        return f"Ray must have one version everywhere: {' '.join(text.split())}"
    if _is_unlucky(error):
        return (
            f"the Ray head at launcher.address={address} could not start a client server for this run; start the "
            "head with GRPC_ENABLE_FORK_SUPPORT=0 (docs/cluster.md)"
        )
    hint = "" if environ.get(AUTH_MODE) == "token" else ", or it wants a token (RAY_AUTH_MODE=token)"
    return f"there is no Ray cluster at launcher.address={address}{hint}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


NUM_LAST_LINES = 10
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class AgentEnd:
    host: str
    code: int
    last_lines: str


class PlacingActor:
    """Runs one worker's node agent. When the actor ends, its agent ends, and so does the worker."""

    def run(self, arguments: list[str], token: str) -> AgentEnd:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        reading, writing = os.pipe()
        os.write(writing, token.encode())
        os.close(writing)
        try:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=environment,
                preexec_fn=_die_with_parent,
            )
        finally:
            os.close(reading)
        assert process.stderr is not None
        with process.stderr:
            lines = deque(process.stderr, maxlen=NUM_LAST_LINES)
        text = b"".join(lines).decode(errors="replace")
        return AgentEnd(host=socket.gethostname(), code=process.wait(), last_lines=text)


def _die_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
