"""Transports by name: the trainer's side is chosen in the config, the engine's by what an update says.

This imports without torch: the controller checks names and counts memory with it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.interfaces import Staged, Verification, WeightPublisher, WeightReceiver
from penstock.types import WeightUpdate

if TYPE_CHECKING:
    from penstock.sync.slot_publisher import Publishing


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a publisher and its receivers meet."""

    folder: Path | None = None
    """For buckets that are files."""
    exchange: dict[str, Any] = field(default_factory=dict)
    """For buckets of this process."""
    device: str = "cpu"
    """Where a receiver's engine has its weights."""
    interface: str = ""
    """The network interface that they meet on, by its name; "" is the loopback."""
    token: str = ""
    """What a receiver must know to be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One way for weights to travel: what it needs, and what it holds."""

    needs: str
    publisher: "Callable[[Mapping[str, Any], Publishing, Rendezvous], WeightPublisher]"
    receiver: Callable[[Rendezvous], WeightReceiver]
    between_processes: bool = True
    snapshots_on_gpu: bool = False
    """Whether the trainer's slots take memory of its GPU."""
    staged_copies: int = 0
    """Copies of the weights that an engine's device holds while it stages an update."""

    def staged_bytes(self, model_bytes: int) -> int:
        return self.staged_copies * model_bytes


def _shared_memory_publisher(
    tensors: Mapping[str, Any], publishing: "Publishing", at: Rendezvous
) -> WeightPublisher:
    from penstock.sync.shared_memory import SharedMemoryPublisher

    assert at.folder is not None
    return SharedMemoryPublisher(tensors, publishing, folder=at.folder)


def _shared_memory_receiver(at: Rendezvous) -> WeightReceiver:
    from penstock.sync.shared_memory import SharedMemoryReceiver

    return SharedMemoryReceiver(at.device)


def _filesystem_publisher(
    tensors: Mapping[str, Any], publishing: "Publishing", at: Rendezvous
) -> WeightPublisher:
    from penstock.sync.filesystem import FilesystemPublisher

    assert at.folder is not None
    return FilesystemPublisher(tensors, publishing, folder=at.folder)


def _filesystem_receiver(at: Rendezvous) -> WeightReceiver:
    from penstock.sync.filesystem import FilesystemReceiver

    return FilesystemReceiver(at.device)


def _http_publisher(tensors: Mapping[str, Any], publishing: "Publishing", at: Rendezvous) -> WeightPublisher:
    from penstock.sync.http_transport import HttpPublisher

    return HttpPublisher(tensors, publishing, token=at.token, interface=at.interface)


def _http_receiver(at: Rendezvous) -> WeightReceiver:
    from penstock.sync.http_transport import HttpReceiver

    return HttpReceiver(at.device, token=at.token)


def _collective_publisher(
    tensors: Mapping[str, Any], publishing: "Publishing", at: Rendezvous
) -> WeightPublisher:
    from penstock.sync.collective import CollectivePublisher

    return CollectivePublisher(tensors, publishing, interface=at.interface)


def _collective_receiver(at: Rendezvous) -> WeightReceiver:
    from penstock.sync.collective import CollectiveReceiver

    return CollectiveReceiver(at.device, interface=at.interface)


def _cuda_ipc_publisher(
    tensors: Mapping[str, Any], publishing: "Publishing", at: Rendezvous
) -> WeightPublisher:
    from penstock.sync.cuda_ipc import CudaIpcPublisher

    return CudaIpcPublisher(tensors, publishing)


def _cuda_ipc_receiver(at: Rendezvous) -> WeightReceiver:
    from penstock.sync.cuda_ipc import CudaIpcReceiver

    return CudaIpcReceiver(at.device)


def _in_process_publisher(
    tensors: Mapping[str, Any], publishing: "Publishing", at: Rendezvous
) -> WeightPublisher:
    from penstock.sync.in_process import InProcessPublisher

    return InProcessPublisher(tensors, publishing, exchange=at.exchange)


def _in_process_receiver(at: Rendezvous) -> WeightReceiver:
    from penstock.sync.in_process import InProcessReceiver

    return InProcessReceiver(at.exchange, at.device)


def _staged_publisher(
    tensors: Mapping[str, Any], publishing: "Publishing", at: Rendezvous
) -> WeightPublisher:
    from penstock.sync.in_process import STAGED_TRANSPORT, InProcessPublisher

    return InProcessPublisher(tensors, publishing, exchange=at.exchange, transport=STAGED_TRANSPORT)


def _staging_receiver(at: Rendezvous) -> WeightReceiver:
    from penstock.sync.in_process import InProcessStagingReceiver

    return InProcessStagingReceiver(at.exchange, at.device)


TRANSPORTS: dict[str, Transport] = {
    "shared_memory": Transport(
        needs="trainer and engines on one machine",
        publisher=_shared_memory_publisher,
        receiver=_shared_memory_receiver,
    ),
    "cuda_ipc": Transport(
        needs="trainer and engines on one GPU",
        publisher=_cuda_ipc_publisher,
        receiver=_cuda_ipc_receiver,
        snapshots_on_gpu=True,
    ),
    "collective": Transport(
        needs="a trusted network between trainer and engines",
        publisher=_collective_publisher,
        receiver=_collective_receiver,
        snapshots_on_gpu=True,
        staged_copies=1,
    ),
    "filesystem": Transport(
        needs="a folder that trainer and engines see under the same path",
        publisher=_filesystem_publisher,
        receiver=_filesystem_receiver,
        staged_copies=1,
    ),
    "http": Transport(
        needs="engines that reach the trainer's machine over the network",
        publisher=_http_publisher,
        receiver=_http_receiver,
        staged_copies=1,
    ),
    "in_process": Transport(
        needs="trainer and engines in one process",
        publisher=_in_process_publisher,
        receiver=_in_process_receiver,
        between_processes=False,
        snapshots_on_gpu=True,
    ),
    "in_process_staged": Transport(
        needs="trainer and engines in one process",
        publisher=_staged_publisher,
        receiver=_staging_receiver,
        between_processes=False,
        snapshots_on_gpu=True,
        staged_copies=1,
    ),
}


def transport_of(name: str) -> Transport:
    if name not in TRANSPORTS:
        raise ConfigError(f"a transport must be one of {', '.join(TRANSPORTS)}, got {name!r}")
    return TRANSPORTS[name]


def check_for_run(name: str) -> None:
    """Whether a run, whose trainer and engines are processes of their own, can use this transport."""
    usable = [each for each, transport in TRANSPORTS.items() if transport.between_processes]
    if name not in usable:
        why = f", which needs {TRANSPORTS[name].needs}" if name in TRANSPORTS else ""
        raise ConfigError(f"sync.transport must be auto or one of {', '.join(usable)}, got {name!r}{why}")


def make_publisher(
    transport: str, tensors: Mapping[str, Any], publishing: "Publishing", at: Rendezvous
) -> WeightPublisher:
    return transport_of(transport).publisher(tensors, publishing, at)


class AnyReceiver:
    """`interfaces.WeightReceiver` for whatever transport an update comes by."""

    def __init__(self, at: Rendezvous | None = None) -> None:
        self._at = at or Rendezvous()
        self._receivers: dict[str, WeightReceiver] = {}

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
            self._receivers[name] = transport_of(name).receiver(self._at)
        return self._receivers[name]
