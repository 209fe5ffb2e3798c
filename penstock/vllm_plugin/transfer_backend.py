"""Implements vLLM's weight transfer backend `penstock`, which takes published weights by any of our transports.

    stage (a thread, beside generation) ─► paused: start, update (load, verify), finish ─► resumed

An update that raises leaves vLLM with half-loaded layers, and the next request kills it. So nothing is raised
here: `outcome` says what happened, and whether the model can still be used.
"""

import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from penstock.errors import PenstockError
from penstock.records import WeightUpdate
from penstock.records.interfaces import Staged
from penstock.sync.transports import AnyReceiver, Rendezvous
from penstock.vllm_plugin.staged_weights import check_arrival, whole_tensors
from penstock.vllm_plugin.weight_loading import check_fits, load_weights


@dataclass
class Meeting(WeightTransferInitInfo):
    """Says how to reach the trainer: `sync.interface`, and the token without which it serves no weights."""

    interface: str = ""
    token: str = ""


@dataclass
class Version(WeightTransferUpdateInfo):
    """Names the staged version that is to be loaded."""

    version: int = -1


@dataclass(slots=True)
class Outcome:
    """Records how the last update ended."""

    kind: str = ""
    """The class name of the error; "" is success."""
    message: str = ""
    is_intact: bool = True
    """Whether the model can still be used."""
    load_s: float = 0.0
    verify_s: float = 0.0
    unverified: list[str] = field(default_factory=list)
    """Tensors that were verified on arrival, and whose location in vLLM's layers is not known."""


class PenstockTransfer(WeightTransferEngine[Meeting, Version]):
    """Receives weights in one vLLM worker, over the transport that each update names."""

    init_info_cls = Meeting
    update_info_cls = Version

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._receiver = AnyReceiver(Rendezvous(device=str(self.device)))
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._staging: Future[Staged] | None = None
        self.outcome = Outcome()

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self._receiver.close()
        self._receiver = AnyReceiver(
            Rendezvous(device=str(self.device), interface=init_info.interface, token=init_info.token)
        )

    def stage(self, text: str) -> dict[str, Any]:
        """Begin to fetch an update, for `staged` to report on. An earlier staged update is dropped."""
        self.drop()
        update = msgspec.json.decode(text, type=WeightUpdate)
        self._staging = self._threads.submit(self._receiver.stage, update)
        return self.staged(0.05)

    def staged(self, timeout_s: float = 0.0) -> dict[str, Any]:
        """Report whether the update has been staged, or why it failed."""
        staging = self._staging
        if staging is None:
            return {"is_done": True, "kind": "PenstockError", "message": "nothing is being staged"}
        try:
            error = staging.exception(timeout_s)
        except TimeoutError:
            return {"is_done": False, "kind": "", "message": ""}
        if error is None:
            return {"is_done": True, "kind": "", "message": ""}
        self._staging = None
        return {"is_done": True, "kind": type(error).__name__, "message": str(error)}

    def drop(self) -> None:
        """Discard what is staged or being staged."""
        staging, self._staging = self._staging, None
        if staging is None:
            return
        if not staging.done():
            self._receiver.cancel()
        staging.add_done_callback(self._drop_staged)

    def start_weight_update(self) -> None:
        self.outcome = Outcome(kind="PenstockError", message="the update has not been loaded")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Version) -> None:
        staging, self._staging = self._staging, None
        self.outcome = Outcome()
        try:
            if staging is None:
                raise PenstockError(f"version {update_info.version} was not staged")
            staged = staging.result()
            if staged.update.version != update_info.version:
                raise PenstockError(
                    f"version {staged.update.version} is staged, and version {update_info.version} was asked for"
                )
            self._load(staged)
            self._receiver.drop(staged)
        except Exception as error:
            traceback.print_exc()
            self.outcome.kind, self.outcome.message = type(error).__name__, str(error)

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        self.drop()
        self._receiver.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load(self, staged: Staged) -> None:
        update = staged.update
        tensors = whole_tensors(staged)
        check_arrival(staged, tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        check_fits(shapes, self.model_config.hf_text_config, update.version)
        self.outcome.is_intact = False
        self.outcome.load_s, self.outcome.unverified = load_weights(
            self.model,
            self.model_config,
            tensors,
            update.fingerprint,
            update.version,
            is_whole=self.parallel_config.world_size == 1,
        )
        self.outcome.is_intact = True

    def _drop_staged(self, staging: "Future[Staged]") -> None:
        if not staging.cancelled() and staging.exception() is None:
            self._receiver.drop(staging.result())
