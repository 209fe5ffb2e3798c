"""Sends weights through shared memory: the trainer copies a snapshot in, engines copy it out.

A bucket is a file that both sides map, in a folder that lives in memory where the system has one
(`/dev/shm`). So nothing has to be registered, inherited or unlinked twice.

    in place  map ─────────────────────────── pause: copy, hash ─► generates
    staged    map, copy beside generation ─── pause: copy on the GPU, hash ─► generates

An engine that has a GPU to itself, with room to spare, stages a copy there, and its pause gets about fifty times
shorter. All others read in place. On a CPU a copy out of private memory takes as long as one out of shared memory,
and most of the pause is the hash of the live weights; `docs/sync.md` has the figures. A GPU's other processes may
need its memory at any moment. Adapters are never staged: they are loaded beside generation anyway.
"""

import errno
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from penstock.errors import DamagedBucket, PenstockError, UpdateAbandoned, UserError
from penstock.models.transfer import side_stream
from penstock.records import Payload, WeightUpdate
from penstock.records.interfaces import Staged
from penstock.sync.bucket_receiver import BucketReceiver, return_memory
from penstock.sync.slot_publisher import HostPublisher, Publishing
from penstock.sync.staged_bucket import Values

log = logging.getLogger(__name__)

TRANSPORT = "shared_memory"
BUCKET_BYTES = 256 << 20
OVERHEAD_BYTES = int(1.5e9)
"""More of a GPU in use than torch has taken here, and than CUDA takes for itself, belongs to another process."""
SPARE_BYTES = int(2e9)


class SharedMemoryPublisher(HostPublisher):
    """Implements the trainer's side: buckets are mapped files."""

    transport = TRANSPORT

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], publishing: Publishing | None = None, *, folder: Path
    ) -> None:
        publishing = publishing or Publishing()
        # Others may publish in the same folder: other ranks of the trainer, or one that replaces this one.
        self._stem = f"{publishing.policy}-{secrets.token_hex(4)}"
        self._folder = folder
        super().__init__(tensors, publishing, bucket_bytes=BUCKET_BYTES)

    def _make_bucket(self, slot: int, number: int, size: int) -> torch.Tensor:
        self._reserve(self._path(slot, number), size)
        return _map(self._path(slot, number), size)

    def _reserve(self, path: Path, size: int) -> None:
        """Allocate the file's memory now. Otherwise the first write takes it, and kills a process that finds
        none."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(file, 0, size)
            finally:
                os.close(file)
        except OSError as error:
            self._free()
            if error.errno != errno.ENOSPC:
                raise
            slots, needed = self._publishing.num_slots, sum(self._sizes) * self._publishing.num_slots
            counted = f"sync.slots={self._publishing.slots}"
            if self._publishing.selection == "delta":
                counted += " + 1 for deltas, each"
            free = shutil.disk_usage(self._folder).free
            raise UserError(
                f"the published weights need {needed / 1e6:.1f} MB in {self._folder} ({counted} times "
                f"{needed / slots / 1e6:.1f} MB), and {free / 1e6:.1f} MB are free there: make it larger (in a "
                "container: --shm-size), or lower sync.slots"
            ) from error

    def _names(self, slot: int) -> tuple[str, ...]:
        return tuple(f"{size}:{self._path(slot, number)}" for number, size in enumerate(self._sizes))

    def _path(self, slot: int, number: int) -> Path:
        return self._folder / f"{self._stem}-{slot}-{number}.weights"

    def _offer(self, number: int, payload: Payload, data: torch.Tensor) -> str:
        path = self._folder / f"{self._stem}-{secrets.token_hex(4)}.weights"
        path.touch(mode=0o600)
        path.write_bytes(data.cpu().numpy().data)
        return f"{data.numel()}:{path}"

    def _withdraw(self, name: str) -> None:
        Path(name.partition(":")[2]).unlink(missing_ok=True)

    def _free(self) -> None:
        for slot in range(self._publishing.num_slots):
            for number in range(len(self._sizes)):
                self._path(slot, number).unlink(missing_ok=True)


class SharedMemoryReceiver(BucketReceiver):
    """Implements the engine's side. Buckets are mapped once and stay mapped, so later updates only copy."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._mapped: dict[str, torch.Tensor] = {}
        self._cancelled = threading.Event()
        self._has_said_why = False

    def stages(self, update: WeightUpdate) -> bool:
        return super().stages(update) or self._copies(update)

    def stage(self, update: WeightUpdate) -> Staged:
        cancelled = self._cancelled = threading.Event()
        staged = super().stage(update)
        if update.payloads or not self._copies(update):
            return staged
        copies = Staged(update, [])
        try:
            for values in staged.held:
                if cancelled.is_set():
                    raise UpdateAbandoned(f"version {update.version}: the update was cancelled")
                with side_stream(self._device):
                    copies.held.append(Values(values.specs, values.bucket.to(self._device, copy=True)))
        except torch.OutOfMemoryError:
            self.drop(copies)
            self._say_once("the GPU's memory was taken meanwhile")
            return staged
        return copies

    def cancel(self) -> None:
        self._cancelled.set()

    def drop(self, staged: Staged) -> None:
        is_on_gpu = any(not isinstance(each, Values) or each.bucket.is_cuda for each in staged.held)
        staged.held.clear()
        if is_on_gpu:
            return_memory(staged.update, self._device)

    def _copies(self, update: WeightUpdate) -> bool:
        """Return whether to stage a copy of an update that could be read in place."""
        if update.payloads or update.selection == "adapter" or self._device.type != "cuda":
            return False
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device) - OVERHEAD_BYTES
        needed = 2 * update.num_bytes + SPARE_BYTES
        if others > 0:
            self._say_once(f"others have {others / 1e9:.1f} GB of the GPU")
        elif free < needed:
            self._say_once(f"a copy needs {needed / 1e9:.1f} GB free on the GPU, and {free / 1e9:.1f} GB are")
        return others <= 0 and free >= needed

    def _say_once(self, why: str) -> None:
        if not self._has_said_why:
            log.info("generation pauses while new weights are copied from the host: %s", why)
            self._has_said_why = True

    def close(self) -> None:
        self._mapped.clear()

    def _bucket(self, name: str) -> torch.Tensor:
        if name not in self._mapped:
            size, _, path = name.partition(":")
            if not Path(path).is_file():
                raise PenstockError(f"the published bucket {path} is gone")
            if Path(path).stat().st_size < int(size):
                raise DamagedBucket(f"the published bucket {path} was cut: it must have {size} bytes")
            self._forget_removed()
            self._mapped[name] = _map(Path(path), int(size))
        return self._mapped[name]

    def _forget_removed(self) -> None:
        """Unmap files that their publisher has removed, which keep their memory until then."""
        for name in list(self._mapped):
            if not Path(name.partition(":")[2]).is_file():
                self._mapped.pop(name, None)


def _map(path: Path, size: int) -> torch.Tensor:
    """Map `size` bytes of a file, shared with every process that maps it. A missing file is made."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
