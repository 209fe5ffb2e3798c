"""Runs AdamW on the host: masters and moments live in host memory, and the device keeps weights and gradients.

    device gradients ─► staging ─► AdamW on the CPU ─► staging ─► device weights

It works bucket by bucket: while the CPU updates one, the gradients of the next and the weights of the one before
travel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from penstock.trainer.config import TrainerConfig
from penstock.trainer.optimizers.update_rules import Float32AdamW, decay_of

BUCKET_VALUES = 1 << 25
"""The number of values that travel together; larger tensors are cut."""


class HasGradient(Protocol):
    grad: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Holds values start..stop of a tensor: a view of its master that AdamW updates."""

    tensor: int
    start: int
    stop: int
    values: nn.Parameter

    def __len__(self) -> int:
        return self.stop - self.start


def host_master(parameter: nn.Parameter, *, rounded: bool) -> nn.Parameter:
    """Return a float32 copy in host memory, or the parameter itself if it is there already and will not be
    rounded."""
    if parameter.device.type == "cpu" and parameter.is_contiguous() and not rounded:
        return parameter
    return nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True).contiguous())


class HostAdamW:
    """Updates host masters from device gradients, and device parameters from the masters."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        masters: Sequence[nn.Parameter],
        gradients: Sequence[HasGradient],
        config: TrainerConfig,
    ) -> None:
        self._parameters, self._gradients = parameters, gradients
        for parameter in parameters:
            parameter.data = parameter.data.contiguous()
        self._buckets = list(_buckets(masters))
        # A master that is the parameter itself need not be copied back.
        self._returns = [p is not m for p, m in zip(parameters, masters, strict=True)]
        slices = [piece for bucket in self._buckets for piece in bucket]
        decays = [decay_of(masters[piece.tensor], config) for piece in slices]
        self._adamw = Float32AdamW([piece.values for piece in slices], config, decays)
        on_gpu = any(parameter.is_cuda for parameter in parameters)
        size = max(sum(len(piece) for piece in bucket) for bucket in self._buckets)
        self._down = [_Staging(size, torch.float32, on_gpu) for _ in range(2)]
        self._up = {
            dtype: [_Staging(size, dtype, on_gpu) for _ in range(2)]
            for dtype in {p.dtype for p, returns in zip(parameters, self._returns, strict=True) if returns}
        }

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self._fetch(0)
        for number, bucket in enumerate(self._buckets):
            if number + 1 < len(self._buckets):
                self._fetch(number + 1)
            self._down[number % 2].wait()
            for piece, span in _spans(bucket):
                if self._gradients[piece.tensor].grad is not None:
                    piece.values.grad = self._down[number % 2].buffer[span]
            self._adamw.step(learning_rate)
            for piece in bucket:
                piece.values.grad = None
            self._send(number)
        for staging in (one for pair in self._up.values() for one in pair):
            staging.wait()

    def state_dict(self) -> dict[str, Any]:
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state)

    def _fetch(self, number: int) -> None:
        """Start copying a bucket's gradients to the host. Its staging buffer was read two buckets ago."""
        staging = self._down[number % 2]
        for piece, span in _spans(self._buckets[number]):
            gradient = self._gradients[piece.tensor].grad
            if gradient is not None:
                staging.buffer[span].copy_(gradient.reshape(-1)[piece.start : piece.stop], non_blocking=True)
                staging.left(gradient.device)

    def _send(self, number: int) -> None:
        """Start copying a bucket's weights to the device, rounded on the host."""
        for pair in self._up.values():
            pair[number % 2].wait()
        for piece, span in _spans(self._buckets[number]):
            parameter = self._parameters[piece.tensor]
            if self._returns[piece.tensor] and self._gradients[piece.tensor].grad is not None:
                staging = self._up[parameter.dtype][number % 2]
                staging.buffer[span].copy_(piece.values)
                target = parameter.view(-1)[piece.start : piece.stop]
                target.copy_(staging.buffer[span], non_blocking=True)
                staging.left(parameter.device)


class _Staging:
    """Holds host memory that a device copies to or from asynchronously, and the event that marks the end of the
    copy."""

    def __init__(self, size: int, dtype: torch.dtype, on_gpu: bool) -> None:
        self.buffer = torch.empty(size, dtype=dtype, pin_memory=on_gpu)
        self._done: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def left(self, device: torch.device) -> None:
        """Note that a copy was started on this device."""
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the last copy that was started is complete."""
        if self._done is not None:
            self._done.synchronize()


def cut_masters(sizes: Sequence[int], *, room: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut masters of these sizes into runs of slices (master, start, stop), of at most `room` values together."""
    bucket: list[tuple[int, int, int]] = []
    left = room
    for master, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + left)
            bucket.append((master, start, stop))
            left -= stop - start
            start = stop
            if left == 0:
                yield bucket
                bucket, left = [], room
    if bucket:
        yield bucket


def _buckets(masters: Sequence[nn.Parameter]) -> Iterator[list[Slice]]:
    flat = [master.detach().view(-1) for master in masters]
    for bucket in cut_masters([len(values) for values in flat], room=BUCKET_VALUES):
        yield [
            Slice(tensor=tensor, start=start, stop=stop, values=nn.Parameter(flat[tensor][start:stop]))
            for tensor, start, stop in bucket
        ]


def _spans(bucket: Sequence[Slice]) -> Iterator[tuple[Slice, slice]]:
    """Yield each slice of a bucket with its span in the staging buffer."""
    start = 0
    for piece in bucket:
        yield piece, slice(start, start + len(piece))
        start += len(piece)
