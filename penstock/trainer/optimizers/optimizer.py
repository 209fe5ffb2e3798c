"""Runs AdamW over float32 master weights, with its learning-rate schedule and gradient clipping."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.errors import UserError
from penstock.records.interfaces import Ranks
from penstock.trainer.config import ParallelConfig, TrainerConfig
from penstock.trainer.optimizers.eightbit_adamw import EightBitAdamW
from penstock.trainer.optimizers.host_adamw import HasGradient, HostAdamW, host_master
from penstock.trainer.optimizers.update_rules import Float32AdamW, UpdateRule, decay_of
from penstock.trainer.parallel.local_shards import LocalShard, local_shard, local_values
from penstock.trainer.parallel.rank_layout import RankLayout


def learning_rate_at(step: int, total_steps: int, config: TrainerConfig) -> float:
    """Return the learning rate of optimizer step `step` (1, 2, …): a linear warm-up, then the schedule.

    The first step after the warm-up has the peak. The last one is a step short of the schedule's end: even if
    the schedule ends at zero, every step still trains.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps - 1) / span)
    falling = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * falling)


class MasterAdamW:
    """Updates float32 weights with AdamW, whatever the model computes in and wherever AdamW's states live.

    In float32 the masters are the parameters themselves. Otherwise each parameter's gradient is added to a
    float32 one as soon as backward has computed it, so accumulation over micro-batches loses no precision
    either. After an update the parameters are rounded copies of their masters. With states on the CPU the
    masters are there too, and the device holds weights and float32 gradients.

    Of weights that are split over ranks it updates this rank's part, which is float32 and its own master.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig,
        extra: Iterable[nn.Parameter] = (),
        layout: RankLayout | None = None,
    ) -> None:
        """`extra` parameters (a value head's) are trained too, and stay in float32. `layout` identifies this
        rank if weights are split."""
        self._config = config
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise ValueError(
                "the model has no parameter that requires a gradient, so there is nothing to train"
            )
        self._on_host = config.optimizer_states == "cpu"
        self._sources = [*trained, *extra]
        """The parameters as the model has them."""
        self._parameters = [_own_part(parameter) for parameter in self._sources]
        self._copies = [
            1 if layout is None else local_shard(parameter, layout).num_copies for parameter in self._sources
        ]
        """For each parameter, the number of ranks that have the same part."""
        self._is_split = [
            own is not whole for own, whole in zip(self._parameters, self._sources, strict=True)
        ]
        rounded = [
            config.dtype == "bfloat16" and index < len(trained) and not is_split
            for index, is_split in enumerate(self._is_split)
        ]
        make_master = host_master if self._on_host else _master
        self._masters = [
            make_master(parameter, rounded=is_rounded)
            for parameter, is_rounded in zip(self._parameters, rounded, strict=True)
        ]
        self._gradients: list[HasGradient] = []
        """The holder of each float32 gradient."""
        for parameter, master, is_rounded in zip(self._parameters, self._masters, rounded, strict=True):
            holder: HasGradient = parameter
            if is_rounded:
                holder = _Holder() if self._on_host else master
                parameter.data = parameter.data.to(torch.bfloat16)
                parameter.register_post_accumulate_grad_hook(_move_gradient_to(holder))  # type: ignore[no-untyped-call]
            self._gradients.append(holder)
        if config.dtype == "bfloat16":
            for parameter in model.parameters() if not any(self._is_split) else ():
                if not parameter.requires_grad and parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
        self._rule = self._make_rule()

    def sum_gradients(self, ranks: Ranks) -> None:
        """Sum gradients over ranks, so that every rank has those of the whole step. Split weights have theirs
        summed in backward."""
        for own, source, is_split in zip(self._parameters, self._sources, self._is_split, strict=True):
            if is_split:
                own.grad = None if source.grad is None else local_values(source.grad)
                source.grad = None
        if ranks.size == 1:
            return
        replicated = [index for index, is_split in enumerate(self._is_split) if not is_split]
        holders = [self._gradients[index] for index in replicated]
        # A rank without rows has no gradients, and a weight that no rank used has none on any rank.
        has_any = np.any(ranks.gather(np.array([holder.grad is not None for holder in holders])), axis=0)
        summed = []
        for index, holder, has_one in zip(replicated, holders, has_any, strict=True):
            if has_one and holder.grad is None:
                holder.grad = torch.zeros_like(self._parameters[index], dtype=torch.float32)
            if has_one:
                assert holder.grad is not None
                summed.append(holder.grad)
        ranks.sum_tensors(summed)

    def gradient_norm(self, ranks: Ranks | None = None) -> float:
        """Return the norm of all gradients together, unclipped. `ranks` are all ranks that hold a part of a
        gradient."""
        gradients = self._present()
        if not any(self._is_split):
            return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        # A part that several ranks have is counted once.
        squares = [
            holder.grad.float().square().sum() / copies
            for holder, copies in zip(self._gradients, self._copies, strict=True)
            if holder.grad is not None
        ]
        total = torch.stack(squares).sum()[None] if squares else torch.zeros(1)
        if ranks is not None:
            ranks.sum_tensors([total])
        return float(total.sqrt())

    def update(self, learning_rate: float, norm: float) -> None:
        """Clip to the configured norm, update, and drop the gradients."""
        if norm > self._config.max_grad_norm:
            torch._foreach_mul_(self._present(), self._config.max_grad_norm / (norm + 1e-6))
        self._rule.step(learning_rate)
        self.forget()
        if not self._on_host:
            self._round()

    def forget(self) -> None:
        """Drop the gradients without using them."""
        for holder in self._gradients:
            holder.grad = None
        for source in self._sources:
            source.grad = None

    def shards(self, layout: RankLayout | None) -> list[LocalShard]:
        """Return which part of each weight this rank's masters are."""
        alone = layout or RankLayout(parallel=ParallelConfig(), rank=0)
        return [local_shard(source, alone) for source in self._sources]

    def update_order(self) -> list[int]:
        """Return the masters' indices in the order in which AdamW numbers them: by weight decay."""
        decays = [decay_of(master, self._config) for master in self._masters]
        ranking = list(dict.fromkeys(decays))
        return sorted(range(len(decays)), key=lambda index: ranking.index(decays[index]))

    def state_dict(self) -> dict[str, Any]:
        return {
            "states": self._config.optimizer_states,
            "adamw": self._rule.state_dict(),
            "masters": [master.detach() for master in self._masters],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["states"] != self._config.optimizer_states:
            raise UserError(
                f"trainer.optimizer_states must be {state['states']}, as in the run that saved this state, "
                f"got {self._config.optimizer_states}"
            )
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)
        self._round()
        self._rule.load_state_dict(state["adamw"])

    def _make_rule(self) -> UpdateRule:
        match self._config.optimizer_states:
            case "float32":
                return Float32AdamW(self._masters, self._config)
            case "8bit":
                return EightBitAdamW(self._masters, self._config)
            case "cpu":
                return HostAdamW(self._parameters, self._masters, self._gradients, self._config)

    def _present(self) -> list[torch.Tensor]:
        return [holder.grad for holder in self._gradients if holder.grad is not None]

    @torch.no_grad()
    def _round(self) -> None:
        """Make the parameters rounded copies of their masters."""
        pairs = zip(self._parameters, self._masters, strict=True)
        copied = [(parameter, master) for parameter, master in pairs if parameter is not master]
        if copied:
            torch._foreach_copy_([parameter for parameter, _ in copied], [master for _, master in copied])


class _Holder:
    """Holds the gradient of a parameter whose master is on another device."""

    def __init__(self) -> None:
        self.grad: torch.Tensor | None = None


def _own_part(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter itself, or this rank's part of it, which shares its memory."""
    own = local_values(parameter)
    return parameter if own is parameter else nn.Parameter(own.detach())


def _master(parameter: nn.Parameter, *, rounded: bool) -> nn.Parameter:
    if not rounded:
        return parameter
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))


def _move_gradient_to(holder: HasGradient) -> Any:
    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(torch.float32)
        holder.grad = gradient if holder.grad is None else holder.grad.add_(gradient)
        parameter.grad = None

    return move
