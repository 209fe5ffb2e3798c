"""Sends weights through files of a folder that both sides see: a shared disk, or a mounted object store.

A bucket is a safetensors file with one tensor, its bytes; the layout is in the file's metadata. The file is
written under another name and then renamed, so no engine ever sees half of it. A version's files are removed
when every engine has it. The next bucket is packed while one is written, and read while one is checked.
"""

import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from penstock.errors import DamagedBucket, PenstockError, UpdateAbandoned, UserError
from penstock.records import Payload, WeightUpdate
from penstock.sync.bucket_receiver import StagingReceiver
from penstock.sync.slot_publisher import HostPublisher, Publishing

TRANSPORT = "filesystem"
BUCKET_BYTES = 256 << 20
TENSOR = "bucket"
TIMEOUT_S, LOOK_AGAIN_S = 10.0, 0.05
"""How long a missing file is waited for, and how often it is looked for. A remote disk may show a new file late."""


class FilesystemPublisher(HostPublisher):
    """Implements the trainer's side. It makes a folder of its own in `folder`, and removes it on `close`."""

    transport = TRANSPORT
    moves = True

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], publishing: Publishing | None = None, *, folder: Path
    ) -> None:
        publishing = publishing or Publishing()
        self._folder = folder / f"{publishing.policy}-{secrets.token_hex(4)}"
        try:
            self._folder.mkdir(parents=True, mode=0o700)
        except OSError as error:
            raise UserError(
                f"sync.folder must be a folder that can be written to, got {folder}: {error}"
            ) from error
        super().__init__(tensors, publishing, bucket_bytes=BUCKET_BYTES)

    def _offer(self, number: int, payload: Payload, data: torch.Tensor) -> str:
        path = self._folder / f"{secrets.token_hex(8)}.safetensors"
        unnamed = path.with_suffix(".part")
        metadata = {
            "payload": msgspec.json.encode(payload).decode(),
            "tensors": msgspec.json.encode(self._specs_of[number]).decode(),
        }
        try:
            save_file({TENSOR: data}, unnamed, metadata)
            os.replace(unnamed, path)
        except (OSError, SafetensorError) as error:
            unnamed.unlink(missing_ok=True)
            if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
                raise UserError(
                    f"the disk of sync.folder is full: {data.numel() / 1e6:.0f} MB could not be written to "
                    f"{self._folder}; each version takes as much as the weights until every engine has it"
                ) from error
            raise
        return str(path)

    def _withdraw(self, name: str) -> None:
        Path(name).unlink(missing_ok=True)

    def _free(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class FilesystemReceiver(StagingReceiver):
    """Implements the engine's side: reads each bucket from its file."""

    def _fetch(self, update: WeightUpdate, number: int, cancelled: threading.Event) -> torch.Tensor:
        path = Path(update.buckets[number])
        until = time.monotonic() + TIMEOUT_S
        while not path.is_file():
            if time.monotonic() > until:
                raise PenstockError(
                    f"version {update.version}: the published bucket {path} is not there; every engine must see "
                    "sync.folder under the same path"
                )
            if cancelled.wait(LOOK_AGAIN_S):
                raise UpdateAbandoned(f"version {update.version}: the update was cancelled")
        try:
            with safe_open(path, framework="pt") as file:
                data: torch.Tensor = file.get_tensor(TENSOR)
        except SafetensorError as error:
            raise DamagedBucket(
                f"version {update.version}: bucket {number} was cut: {path}: {error}"
            ) from error
        except OSError as error:  # it was withdrawn, or the disk has failed: a retry may succeed
            raise PenstockError(
                f"version {update.version}: bucket {number} can't be read: {path}: {error}"
            ) from error
        return data
