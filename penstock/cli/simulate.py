"""`penstock simulate`: what a run would do on a cluster that is not there."""

from penstock.planner.simulated_run import Outcome


def lines_of(outcome: Outcome) -> list[str]:
    """For a person."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(outcome.dropped.items()))
    return [
        f"{outcome.engines:,} engines, {outcome.ranks} ranks: {outcome.steps} steps of "
        f"{outcome.groups // outcome.steps:,} groups in {outcome.hours:.2f} h of virtual time",
        f"busy: trainer {outcome.trainer_busy:.0%}, engines {outcome.engine_busy:.0%}; "
        f"{outcome.tokens_per_s:,.0f} tokens/s",
        f"staleness per token: mean {outcome.staleness_mean:.2f}, max {outcome.staleness_max}",
        f"nodes that died: {outcome.node_deaths}; dropped groups: {dropped or 'none'}",
        f"the controller took {outcome.controller_us_per_group / 1000:.2f} ms of CPU a group (with the simulation "
        "of its engines)",
    ]
