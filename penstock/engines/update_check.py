"""What an engine refuses before it takes any part of an update, each with a sentence."""

from collections.abc import Collection, Mapping

from penstock.errors import BaseMissing, PenstockError
from penstock.types import Interrupt, WeightUpdate


def check_update(
    update: WeightUpdate,
    interrupt: Interrupt,
    *,
    name: str,
    versions: Mapping[str, int],
    interrupts: Collection[Interrupt],
    base: int | None = None,
    adds_policies: bool = False,
    is_intact: bool = True,
) -> None:
    """Raise `PenstockError` unless the engine `name`, which serves `versions` (one per policy), can take this;
    `BaseMissing` where a full update would do. `base` is the version under which its full weights came; None: that
    of the policy. `adds_policies`: an adapter may be that of a new one. `is_intact` is False when an earlier update
    failed half-way: nothing can build on that, and full weights of any version end it."""
    if interrupt not in interrupts:
        raise PenstockError(
            f"{name} can't update with interrupt {interrupt!r}; set sync.interrupt={' or '.join(interrupts)}"
        )
    served = versions.get(update.policy)
    if served is None and not (adds_policies and update.selection == "adapter"):
        policies = ", ".join(map(repr, versions))
        raise PenstockError(f"{name} serves policy {policies}, got an update of {update.policy!r}")
    has_weights = is_intact or update.base is not None
    if served is not None and has_weights and update.version <= served:
        raise PenstockError(f"{name} serves version {served}, got an update to {update.version}")
    below = served if base is None else base
    if update.base is not None and not (is_intact and update.base == below):
        has = f"serves version {below}" if is_intact else "has weights of no version"
        kind = "an adapter for" if update.selection == "adapter" else "what has changed since"
        raise BaseMissing(
            f"{name} {has}, got an update to {update.version} that holds only {kind} version {update.base}; "
            "send it a full one"
        )
