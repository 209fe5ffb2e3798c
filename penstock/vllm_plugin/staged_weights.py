"""Presents a staged update as whole tensors: views into its buckets, copied only where they span several."""

from collections.abc import Mapping

import torch

from penstock.errors import PenstockError
from penstock.records.interfaces import Staged
from penstock.sync.bucket_layout import covered, part, view
from penstock.sync.fingerprint import Fingerprinter, compare
from penstock.sync.staged_bucket import Values


def whole_tensors(staged: Staged) -> dict[str, torch.Tensor]:
    """Return the tensors by name. Raise `PenstockError` if the update holds only changes or parts of tensors."""
    update = staged.update
    counts = covered(update.tensors)
    tensors: dict[str, torch.Tensor] = {}
    for bucket in staged.held:
        if not isinstance(bucket, Values):
            raise PenstockError(
                f"version {update.version}: vLLM takes whole weights; set sync.selection=full"
            )
        for spec in bucket.specs:
            values = view(bucket.bucket, spec)
            if not spec.start:
                tensors[spec.name] = values
                continue
            if spec.name not in tensors:
                tensors[spec.name] = torch.zeros(spec.shape, dtype=values.dtype, device=values.device)
            part(tensors[spec.name], spec).copy_(values)
    cut = [name for name, tensor in tensors.items() if counts[name] != tensor.numel()]
    if cut:
        raise PenstockError(f"version {update.version}: it holds only parts of {cut[0]}")
    return tensors


def check_arrival(staged: Staged, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `FingerprintMismatch` unless these are the trainer's values."""
    compare(staged.update.fingerprint, Fingerprinter()(tensors), staged.update.version)
