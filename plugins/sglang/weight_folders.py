"""New weights on their way into an SGLang server: written as a checkpoint that it loads from the disk."""

import shutil
import tempfile
from pathlib import Path

from penstock.models.published import as_checkpoint
from penstock.records import WeightUpdate
from penstock.records.interfaces import WeightReceiver

COPIED = ("*.json", "*.model", "*.txt", "*.jinja")
"""What a model's folder holds beside its weights."""


class WeightFolders:
    """One folder for each version; those that servers have left behind are removed."""

    def __init__(self, receiver: WeightReceiver, *, model: str, folder: str = "") -> None:
        self._receiver = receiver
        self._model = Path(model)
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-weights-", dir=folder or None))

    def write(self, update: WeightUpdate) -> Path:
        """The published weights, verified on arrival."""
        import torch
        from safetensors.torch import save_file

        staged = self._receiver.stage(update)
        tensors = {
            each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype)) for each in update.tensors
        }
        try:
            self._receiver.load(staged, tensors)()
        finally:
            self._receiver.drop(staged)
        folder = self._folder / f"version{update.version}"
        folder.mkdir(exist_ok=True)
        named = {name: tensor.contiguous() for name, tensor in as_checkpoint(tensors.items())}
        save_file(named, str(folder / "model.safetensors"))
        for pattern in COPIED:
            for path in self._model.glob(pattern):
                if not path.name.endswith(".index.json"):
                    shutil.copy(path, folder)
        return folder

    def remove_before(self, version: int) -> None:
        for folder in self._folder.glob("version*"):
            if int(folder.name.removeprefix("version")) < version:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
