"""Whom a trainer works with: nobody, ranks that it is given, or the processes of its group.

Different things are told to, and summed over, different ranks, and models may be split over them. A trainer asks
this record and need not know which of the three it is.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.interfaces import Ranks
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.parallel.rank_layout import RankLayout
from penstock.trainer.ranks import SingleRank

if TYPE_CHECKING:
    from penstock.trainer.config import TrainerConfig
    from penstock.trainer.parallel.process_ranks import GroupRanks, ProcessRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRoles:
    """The other ranks of a trainer, by what they are needed for."""

    data: Ranks
    """Those that train on other plans: what they tell each other is of the whole step."""
    gradients: Ranks
    """Those whose gradients of a weight that all of them have add up."""
    world: Ranks
    processes: "ProcessRanks | None" = None

    @classmethod
    def of(cls, ranks: Ranks | None, processes: "ProcessRanks | None") -> "RankRoles":
        if processes is not None:
            return cls(
                data=processes.data,
                gradients=processes.gradients,
                world=processes.world,
                processes=processes,
            )
        alone = ranks or SingleRank()
        return cls(data=alone, gradients=alone, world=alone)

    @property
    def layout(self) -> RankLayout | None:
        return None if self.processes is None else self.processes.layout

    @property
    def checkpoints(self) -> "GroupRanks | None":
        """Those that write checkpoints with this one."""
        return None if self.processes is None else self.processes.checkpoints

    @property
    def is_split(self) -> bool:
        """Whether each rank holds a part of every model."""
        return self.layout is not None and self.layout.is_sharded

    def split(self, policy: PackedModel, config: "TrainerConfig", device: str) -> None:
        """Split a model over the ranks, in place, where they split models."""
        if self.is_split:
            from penstock.trainer.parallel.split_model import split_model

            assert self.processes is not None
            split_model(policy, self.processes, config, device)
