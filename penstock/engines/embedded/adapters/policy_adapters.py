"""Serves the adapters of an engine's policies beside the weights or merged, as `engine.embedded.adapters` says."""

from collections.abc import Collection, Iterable

from torch import nn

from penstock.engines.embedded.adapters.adapter_serving import AdapterServing
from penstock.engines.embedded.adapters.merged import MergedAdapter
from penstock.engines.embedded.adapters.row_slots import RowSlots
from penstock.engines.embedded.adapters.unmerged import UnmergedAdapters
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.errors import PenstockError
from penstock.records import WeightUpdate


class PolicyAdapters:
    """Chooses how adapters are served. `auto` merges DoRA, which can't be served otherwise, and puts everything
    else beside the weights."""

    def __init__(self, model: nn.Module, rows: RowSlots, config: EmbeddedConfig) -> None:
        self._how = config.adapters
        self._merged = MergedAdapter(model)
        self._unmerged = UnmergedAdapters(
            model, rows, max_adapters=config.max_adapters, max_rank=config.max_adapter_rank
        )

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the policies that have an adapter; the others are served with the weights themselves."""
        return self._unmerged.policies + self._merged.policies

    def expect(self, layers: Iterable[str], rank: int) -> None:
        """Make room beside these layers for adapters of this rank, except with `adapters: merged`."""
        if self._how != "merged":
            self._unmerged.expect(layers, rank)

    def serving(self, update: WeightUpdate, policies: Collection[str]) -> AdapterServing:
        """Choose whether an update is served merged or unmerged, and raise if it can't be served. `policies` are
        all that the engine serves."""
        spec = update.adapter
        if spec is None:
            raise PenstockError(f"the adapter of version {update.version} does not say its rank and scale")
        if spec.dora and self._how == "unmerged":
            raise PenstockError(
                "DoRA is served merged, and engine.embedded.adapters=unmerged; set it to auto or merged"
            )
        merges = spec.dora or self._how == "merged"
        others = [policy for policy in policies if policy != update.policy]
        if merges and others:
            raise PenstockError(
                f"an adapter of policy {update.policy!r} that is merged would change the weights of "
                f"{' and '.join(map(repr, others))} too; serve several with engine.embedded.adapters=unmerged "
                "(without DoRA)"
            )
        chosen, other = (self._merged, self._unmerged) if merges else (self._unmerged, self._merged)
        if other.policies:
            raise PenstockError(
                f"policy {other.policies[0]!r} has an adapter that is {'not ' if merges else ''}merged, got one "
                f"that is{'' if merges else ' not'}; send the full weights first"
            )
        chosen.check(update)
        return chosen

    def take_off(self, policy: str) -> None:
        for each in (self._merged, self._unmerged):
            if policy in each.policies:
                each.take_off(policy)
