"""What the arms of `bench train` share: a shape, a packed row, and how it is computed."""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.bench.shapes import make_shape
from penstock.models.load import resolve_device
from penstock.trainer.config import TrainerConfig
from penstock.trainer.forward.checkpointing import Checkpointing
from penstock.trainer.forward.packed_model import PackedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSetting:
    """Of one invocation. What is not named depends on whether there is a GPU."""

    shape: str
    device: str
    tokens: int
    """Of one packed row."""
    length: int
    """Of each sequence in it."""
    checkpointing: Checkpointing
    steps: int

    @classmethod
    def of(
        cls,
        shape: str | None,
        tokens: int | None,
        length: int | None,
        *,
        checkpointing: Checkpointing,
        steps: int,
    ) -> "TrainSetting":
        device = resolve_device("auto")
        on_gpu = device != "cpu"
        return cls(
            shape=shape or ("1.5b" if on_gpu else "tiny"),
            device=device,
            tokens=tokens or (16384 if on_gpu else 512),
            length=length or (1024 if on_gpu else 128),
            checkpointing=checkpointing,
            steps=steps,
        )

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def trainer(self) -> TrainerConfig:
        return TrainerConfig(
            dtype="bfloat16" if self.on_gpu else "float32", logprob_chunk_tokens=4096 if self.on_gpu else 256
        )

    def model(self, dtype: torch.dtype) -> Any:
        """With random weights."""
        return make_shape(self.shape, self.device, dtype)

    def packed(self, model: Any, *, compiled: bool) -> PackedModel:
        """The trainer's forward pass."""
        return PackedModel(
            model,
            chunk_tokens=self.trainer.logprob_chunk_tokens,
            checkpointing=self.checkpointing,
            compiled=compiled,
        )

    def directions(self) -> torch.Tensor:
        """What the row's logprobs are weighted by in the loss."""
        return torch.randn(self.tokens, device=self.device) / self.tokens

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        return {
            "shape": self.shape,
            "tokens": self.tokens,
            "length": self.length,
            "checkpointing": self.checkpointing,
        }
