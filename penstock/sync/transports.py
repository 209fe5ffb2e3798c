"""Finds transports by name or path: the config names the trainer's side, and each update names the engine's.

This imports without torch, since the controller uses it to check names and count memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ConfigError, UserError
from penstock.records import WeightUpdate
from penstock.records.interfaces import Staged, Verification, WeightPublisher, WeightReceiver
from penstock.usercode import is_function_path, load_object

if TYPE_CHECKING:
    from penstock.sync.slot_publisher import Publishing


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Says where a publisher and its receivers meet."""

    folder: Path | None = None
    """For buckets that are files."""
    exchange: dict[str, Any] = field(default_factory=dict)
    """For buckets inside this process."""
    device: str = "cpu"
    """The device of the receiving engine's weights."""
    interface: str = ""
    """Name of the network interface that they meet on; "" is the loopback."""
    token: str = ""
    """The token that a receiver must show."""


class NamedPublisher(WeightPublisher, Protocol):
    """Writes the name of its transport into each update, by which engines choose their receiver."""

    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Describes a transport: what it needs, what memory it takes, and where its two sides are."""

    needs: str
    publisher: str | Callable[..., NamedPublisher]
    """A class, or its `module:name` where importing it takes long. It is called with the tensors, their
    `Publishing`, and the fields in `publisher_takes`."""
    receiver: str | Callable[..., WeightReceiver]
    """A class, or its `module:name`, for the engine's side. It is called with a device and the fields in
    `receiver_takes`."""
    publisher_takes: tuple[str, ...] = ()
    """The fields of `Rendezvous` that are passed as keyword arguments."""
    receiver_takes: tuple[str, ...] = ()
    between_processes: bool = True
    between_machines: bool = False
    on_one_gpu: bool = False
    """Whether both sides must be on the same GPU."""
    uses_nccl: bool = False
    """Whether it goes over NCCL between GPUs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that processes of both sides must have when they start."""
    snapshots_on_gpu: bool = False
    """Whether the trainer's slots take memory of its GPU."""
    staged_copies: int = 0
    """Copies of the weights that an engine's device holds while it stages an update."""

    def staged_bytes(self, model_bytes: int, selection: str = "full") -> int:
        """Return the most bytes that an engine holds while staging: for a delta, at least a copy of the weights."""
        return max(self.staged_copies, int(selection == "delta")) * model_bytes

    def publish(self, tensors: Mapping[str, Any], publishing: "Publishing", at: Rendezvous) -> NamedPublisher:
        made: NamedPublisher = _load(self.publisher)(tensors, publishing, **_taken(at, self.publisher_takes))
        return made

    def receive(self, at: Rendezvous) -> WeightReceiver:
        made: WeightReceiver = _load(self.receiver)(device=at.device, **_taken(at, self.receiver_takes))
        return made


def _load(path: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(path, str):
        return path
    module, _, name = path.partition(":")
    made: Callable[..., Any] = getattr(import_module(module), name)
    return made


def _taken(at: Rendezvous, names: tuple[str, ...]) -> dict[str, Any]:
    taken = {name: getattr(at, name) for name in names}
    assert all(value is not None for value in taken.values()), f"this transport needs {names}"
    return taken


TRANSPORTS: dict[str, Transport] = {
    "shared_memory": Transport(
        needs="trainer and engines on one machine",
        publisher="penstock.sync.shared_memory:SharedMemoryPublisher",
        publisher_takes=("folder",),
        receiver="penstock.sync.shared_memory:SharedMemoryReceiver",
    ),
    "cuda_ipc": Transport(
        needs="trainer and engines on one GPU",
        publisher="penstock.sync.cuda_ipc:CudaIpcPublisher",
        receiver="penstock.sync.cuda_ipc:CudaIpcReceiver",
        on_one_gpu=True,
        snapshots_on_gpu=True,
    ),
    "collective": Transport(
        needs="a trusted network between trainer and engines",
        publisher="penstock.sync.collective:CollectivePublisher",
        publisher_takes=("interface",),
        receiver="penstock.sync.collective:CollectiveReceiver",
        receiver_takes=("interface",),
        between_machines=True,
        uses_nccl=True,
        # NCCL would end every process of a group in which one fails; here the others are notified and continue.
        environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        snapshots_on_gpu=True,
        staged_copies=1,
    ),
    "filesystem": Transport(
        needs="a folder that trainer and engines see under the same path",
        publisher="penstock.sync.filesystem:FilesystemPublisher",
        publisher_takes=("folder",),
        receiver="penstock.sync.filesystem:FilesystemReceiver",
        between_machines=True,
        staged_copies=1,
    ),
    "http": Transport(
        needs="engines that reach the trainer's machine over the network",
        publisher="penstock.sync.http_transport:HttpPublisher",
        publisher_takes=("token", "interface"),
        receiver="penstock.sync.http_transport:HttpReceiver",
        receiver_takes=("token",),
        between_machines=True,
        staged_copies=1,
    ),
    "in_process": Transport(
        needs="trainer and engines in one process",
        publisher="penstock.sync.in_process:InProcessPublisher",
        publisher_takes=("exchange",),
        receiver="penstock.sync.in_process:InProcessReceiver",
        receiver_takes=("exchange",),
        between_processes=False,
        snapshots_on_gpu=True,
    ),
    "in_process_staged": Transport(
        needs="trainer and engines in one process",
        publisher="penstock.sync.in_process:InProcessStagedPublisher",
        publisher_takes=("exchange",),
        receiver="penstock.sync.in_process:InProcessStagingReceiver",
        receiver_takes=("exchange",),
        between_processes=False,
        snapshots_on_gpu=True,
        staged_copies=1,
    ),
}


def transport_of(name: str) -> Transport:
    """Return the built-in transport of this name, or the user's by path."""
    if is_function_path(name):
        own = load_object(name, what="transport")
        if not isinstance(own, Transport):
            raise UserError(
                f"the transport {name!r} must be a penstock.sync.transports.Transport, got {own!r}"
            )
        return own
    if name not in TRANSPORTS:
        raise ConfigError(f"a transport must be one of {', '.join(TRANSPORTS)}, got {name!r}")
    return TRANSPORTS[name]


def choose_transport(
    *, share_a_gpu: bool, are_apart: bool, folder: str = "", interface: str = ""
) -> tuple[str, str]:
    """Return what `auto` means, the fastest transport that works, and the reason. If the sides are on several
    machines (`are_apart`), the settings decide which transport can reach the engines."""
    if are_apart and folder:
        return "filesystem", "several machines that see sync.folder"
    if are_apart and interface:
        return "collective", "several machines on the network of sync.interface"
    if are_apart:
        return "http", "several machines"
    return ("cuda_ipc", "one GPU") if share_a_gpu else ("shared_memory", "")


def check_for_run(name: str) -> None:
    """Raise `ConfigError` if a run, whose trainer and engines are separate processes, can't use this transport.
    A transport by path is loaded when it is needed."""
    usable = [each for each, transport in TRANSPORTS.items() if transport.between_processes]
    if name not in usable and not is_function_path(name):
        why = f", which needs {TRANSPORTS[name].needs}" if name in TRANSPORTS else ""
        raise ConfigError(
            f"sync.transport must be auto, one of {', '.join(usable)}, or the path of your own (file.py:NAME or "
            f"module:NAME), got {name!r}{why}"
        )


def make_publisher(
    transport: str, tensors: Mapping[str, Any], publishing: "Publishing", at: Rendezvous
) -> WeightPublisher:
    publisher = transport_of(transport).publish(tensors, publishing, at)
    publisher.transport = transport
    return publisher


class AnyReceiver:
    """Implements `WeightReceiver` for all transports, choosing one by the update."""

    def __init__(self, at: Rendezvous | None = None) -> None:
        self._at = at or Rendezvous()
        self._receivers: dict[str, WeightReceiver] = {}

    def join(self, *, interface: str, token: str) -> None:
        """Take updates from this trainer from now on: a server starts before its model has one. What was staged
        before must have been dropped."""
        self.close()
        self._at = replace(self._at, interface=interface, token=token)

    def stages(self, update: WeightUpdate) -> bool:
        return self._of(update).stages(update)

    def stage(self, update: WeightUpdate) -> Staged:
        return self._of(update).stage(update)

    def cancel(self) -> None:
        for receiver in self._receivers.values():
            receiver.cancel()

    def is_prepared(self, staged: Staged) -> bool:
        return self._of(staged.update).is_prepared(staged)

    def load(self, staged: Staged, tensors: Mapping[str, Any]) -> Verification:
        return self._of(staged.update).load(staged, tensors)

    def drop(self, staged: Staged) -> None:
        self._of(staged.update).drop(staged)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()

    def _of(self, update: WeightUpdate) -> WeightReceiver:
        name = update.transport
        if name not in self._receivers:
            self._receivers[name] = transport_of(name).receive(self._at)
        return self._receivers[name]
