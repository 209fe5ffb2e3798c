"""Writes a trainer's checkpoints beside its steps, one at a time.

begin (between two steps): queue copies ─► next step ─ … ─ its update waits for the copies
                                └─► thread: write ─ fsync ─ rename ─ `latest` ─ remove older ones
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch

from penstock.checksums import Checksum, write_checksums
from penstock.records import CheckpointWritten
from penstock.records.interfaces import Ranks
from penstock.safe_files import remove_folder, replace_link
from penstock.trainer.checkpoint.checkpoint_state import CheckpointState
from penstock.trainer.parallel.joint_folder import agree, joint_folder
from penstock.trainer.parallel.ranks import SingleRank
from penstock.trainer.trainer_start import LATEST, MODEL, TRAINER_STATE


class CheckpointRequest(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    files: dict[str, bytes]
    """Files to add for other parts of the run: contents by name."""
    remove: tuple[str, ...] = ()
    """Folders to remove once this checkpoint is complete."""


class CheckpointedTrainer(Protocol):
    """Declares what the writer needs of `penstock.trainer.policy_trainer.PolicyTrainer`."""

    @property
    def trained(self) -> "SavedWeights": ...

    def checkpoint_state(self) -> CheckpointState: ...

    def write_state(self, folder: Path, state: CheckpointState) -> Mapping[Path, Checksum]: ...


class SavedWeights(Protocol):
    """Declares what the writer needs of `penstock.trainer.trained_weights.TrainedWeights`."""

    def write_config(self, folder: Path) -> None: ...

    def gather(self, own: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]: ...

    def write_weights(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> Mapping[Path, Checksum]: ...


class CheckpointWriter:
    """Writes checkpoints in a thread. Call `begin` in the thread that runs the steps, the other methods from
    any."""

    def __init__(
        self,
        trainer: CheckpointedTrainer,
        save_tokenizer: Callable[[Path], None],
        say: Callable[[str], None] = lambda line: None,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks` are those that write together. They need a process group that nothing else uses, since steps
        continue meanwhile."""
        self._ranks: Ranks = ranks or SingleRank()
        self._trainer = trainer
        self._save_tokenizer = save_tokenizer
        self._say = say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[CheckpointWritten] | None = None
        self._model_files: dict[str, bytes] | None = None
        self._has_said = False

    def begin(self, request: CheckpointRequest) -> None:
        """Wait for the previous checkpoint, then take the state as it is now and start to write it. If the host has
        no room for copies, wait until it is written."""
        self.settle()
        if self._model_files is None:
            self._model_files = self._files_beside_weights()
        state = self._trainer.checkpoint_state()
        self._writing = self._thread.submit(self._write, request, state, self._model_files)
        if state.is_live:
            if not self._has_said:
                self._say(
                    "the host has no memory free for a copy of the trainer's state: training waits while "
                    "checkpoints are written"
                )
            self._has_said = True
            self.settle()

    def written(self) -> "Future[CheckpointWritten]":
        """Return the future of the last checkpoint that was begun. It completes when the checkpoint is durable,
        or fails."""
        if self._writing is None:
            raise ValueError("no checkpoint was begun")
        return self._writing

    def settle(self) -> None:
        """Wait until nothing is being written. A failure is not raised here: `written` reports it."""
        if self._writing is not None:
            self._writing.exception()

    def _files_beside_weights(self) -> dict[str, bytes]:
        """Return the files of a saved model other than its weights. They are made once: training does not change
        them, and making them holds the GIL. Only rank 0 does so, since transformers lets no other rank write
        them."""
        if self._ranks.rank > 0:
            return {}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self._trainer.trained.write_config(folder)
            self._save_tokenizer(folder)
            paths = [path for path in folder.rglob("*") if path.is_file()]
            return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    def _write(
        self, request: CheckpointRequest, state: CheckpointState, model_files: Mapping[str, bytes]
    ) -> CheckpointWritten:
        begin = time.perf_counter()
        folder, num_bytes = Path(request.folder), 0
        own: dict[Path, Checksum] = {}
        with joint_folder(folder, self._ranks) as unnamed:

            def write_own() -> None:
                state.wait()
                for name in (TRAINER_STATE, MODEL):
                    (unnamed / name).mkdir(exist_ok=True)
                own.update(self._trainer.write_state(unnamed / TRAINER_STATE, state))

            agree(self._ranks, write_own)
            sums = self._gather(own)
            weights = self._trainer.trained.gather(state.weights)
            if self._ranks.rank == 0:
                sums |= self._trainer.trained.write_weights(unnamed / MODEL, weights)
                _write_files(unnamed / MODEL, model_files)
                _write_files(unnamed, request.files)
                write_checksums(unnamed, sums)
                num_bytes = sum(path.stat().st_size for path in unnamed.rglob("*") if path.is_file())
        if self._ranks.rank > 0:
            return CheckpointWritten(seconds=time.perf_counter() - begin, num_bytes=0)
        replace_link(folder.with_name(LATEST), folder.name)
        for old in request.remove:
            remove_folder(Path(old))
        return CheckpointWritten(seconds=time.perf_counter() - begin, num_bytes=num_bytes)

    def _gather(self, own: Mapping[Path, Checksum]) -> dict[Path, Checksum]:
        """Join the checksums of what every rank wrote."""
        encoded = msgspec.json.encode({str(path): known for path, known in own.items()})
        parts = self._ranks.gather(np.frombuffer(encoded, dtype=np.uint8))
        read = [msgspec.json.decode(bytes(part), type=dict[str, Checksum]) for part in parts]
        return {Path(path): known for part in read for path, known in part.items()}


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
