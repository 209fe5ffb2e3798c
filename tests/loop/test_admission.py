import msgspec
import numpy as np

from penstock.loop.admission import Late, ReadyGroup, StalenessGate, StepGroups, Ticket
from penstock.loop.history import VersionHistory
from penstock.records import codec
from tests.records.builders import scored


def gate(
    late: Late = "mask", *, per_step: int = 1, max_staleness: int = 1, num_groups: int | None = None
) -> StalenessGate:
    """Version v holds the weights of step v."""
    return StalenessGate(
        groups_per_step=per_step,
        max_staleness=max_staleness,
        late=late,
        num_groups=num_groups,
        history=VersionHistory(steps=range(8)),
    )


def train_one(gate: StalenessGate, ticket: Ticket, versions: list[int]) -> None:
    gate.finish(ticket, scored(ticket.number, versions))
    selection, _ = gate.select()
    assert selection is not None
    gate.trained(selection)


def test_what_another_policy_sampled_has_no_age_here() -> None:
    """A judge's turn behind the policy's: of an old version, and of one that the policy has never had."""
    for version in (0, 99):
        one = gate("drop")
        one.step = one.served_step = 5
        ticket = one.admit()
        group = scored(ticket.number, [5, 5])
        (episode,) = group.group.episodes
        judge = msgspec.structs.replace(
            episode.turns[0], policy="judge", versions=np.full(2, version, np.int32)
        )
        episodes = (msgspec.structs.replace(episode, turns=(*episode.turns, judge)),)
        both = msgspec.structs.replace(group, group=msgspec.structs.replace(group.group, episodes=episodes))
        assert one.finish(ticket, both)
        selection, dropped = one.select()
        assert selection is not None
        assert dropped == []
        ((samples,),) = (ready.samples for ready in selection.groups)
        assert [(sample.policy, sample.versions.tolist()) for sample in samples] == [
            ("policy", [-1, -1, 5, 5])
        ]


def test_admission_counts_everything_outstanding_and_shrinks_with_lag() -> None:
    one = gate(per_step=2, max_staleness=1)
    tickets = [one.admit() for _ in range(4)]
    assert (one.outstanding, one.limit, one.may_admit()) == (4, 4, False)
    for ticket in tickets[:2]:
        one.finish(ticket, scored(ticket.number, [0]))
    selection, _ = one.select()
    assert selection is not None
    assert one.outstanding == 4
    one.trained(selection)
    assert (one.step, one.lag, one.limit, one.outstanding) == (1, 1, 2, 2)
    one.served_step = 1
    assert (one.limit, one.may_admit()) == (4, True)


def test_no_more_groups_than_the_run_needs_are_admitted() -> None:
    one = gate(per_step=1, max_staleness=3, num_groups=2)
    first = one.admit()
    one.admit()
    assert not one.may_admit()
    train_one(one, first, [0])
    one.served_step = 1
    assert not one.may_admit()


def test_ready_groups_hold_others_back_only_while_the_trainer_never_waits() -> None:
    one = gate("correct", max_staleness=2)
    train_one(one, one.admit(), [0])
    one.served_step = 1
    ready = one.admit()
    one.finish(ready, scored(ready.number, [1]))
    assert (one.outstanding, one.limit, one.stocked, one.may_admit()) == (1, 3, True, False)
    assert one.select()[0] is not None
    assert one.select()[0] is None  # the trainer waits at step 1
    found = []
    for step in range(2, 7):
        one.trained(StepGroups(step=step, groups=tuple(one._training.values())))
        one.served_step = step
        ready = one.admit()
        one.finish(ready, scored(ready.number, [step]))
        found.append((one.step, one.stocked))
        one.select()
    assert found == [(2, False), (3, False), (4, False), (5, True), (6, True)]


def test_a_dropped_group_makes_room() -> None:
    one = gate(max_staleness=0)
    ticket = one.admit()
    assert not one.may_admit()
    one.drop(ticket.number)
    assert one.may_admit()
    assert one.outstanding == 0


def late_group(late: Late) -> StalenessGate:
    """At step 2 with bound 1: a straggler with tokens of versions 0, 1 and 2 has just finished."""
    one = gate(late, per_step=1, max_staleness=1)
    straggler = one.admit()
    for version in range(2):
        ticket = one.admit()
        train_one(one, ticket, [version])
        one.served_step = version + 1
    one.finish(straggler, scored(straggler.number, [0, 1, 2]))
    assert one.step == 2
    return one


def test_mask_leaves_tokens_within_the_bound() -> None:
    selection, dropped = late_group("mask").select()
    assert selection is not None
    assert selection.groups[0].samples[0][0].loss_mask.tolist() == [False, False, False, True, True]
    assert dropped == []


def test_correct_leaves_every_token() -> None:
    selection, _ = late_group("correct").select()
    assert selection is not None
    assert selection.groups[0].samples[0][0].loss_mask.tolist() == [False, False, True, True, True]


def test_drop_gives_the_group_up_with_a_reason() -> None:
    one = late_group("drop")
    selection, dropped = one.select()
    assert selection is None
    assert [old.scored.group.task.id for old in dropped] == ["t0"]
    assert one.outstanding == 0


def test_a_group_that_is_late_throughout_is_dropped_under_mask() -> None:
    one = gate("mask", max_staleness=0, per_step=1)
    ticket = one.admit()
    one.step = one.served_step = 1
    one.finish(ticket, scored(0, [0, 0]))
    selection, dropped = one.select()
    assert (selection, len(dropped)) == (None, 1)


def test_wait_holds_the_step_for_a_group_that_would_be_late_after_it() -> None:
    one = gate("wait", per_step=1, max_staleness=1)
    straggler, quick = one.admit(), one.admit()
    train_one(one, quick, [0])
    one.served_step = 1
    other = one.admit()
    one.finish(other, scored(other.number, [1]))
    assert one.select() == (None, [])
    one.finish(straggler, scored(straggler.number, [0, 1]))
    selection, _ = one.select()
    assert selection is not None
    assert [group.ticket.number for group in selection.groups] == [straggler.number]


def test_wait_reserves_room_for_several_stragglers() -> None:
    """Two groups of deadline 2 are running and steps hold one: step 1 may go to a quick group, step 2 not."""
    one = gate("wait", per_step=1, max_staleness=2)
    stragglers = [one.admit(), one.admit()]
    quick = one.admit()
    train_one(one, quick, [0])
    one.served_step = 1
    other = one.admit()
    one.finish(other, scored(other.number, [1]))
    assert one.select()[0] is None
    one.finish(stragglers[0], scored(0, [0]))
    selection, _ = one.select()
    assert selection is not None
    assert selection.groups[0].ticket.number == 0


def test_a_group_without_a_sampled_token_is_not_taken_in() -> None:
    one = gate()
    assert not one.finish(one.admit(), scored(0, []))
    assert (one.num_running, one.num_ready) == (1, 0)
    one.drop(0)
    assert one.outstanding == 0


def test_a_group_keeps_the_bound_it_was_admitted_under() -> None:
    one = gate("drop", per_step=1, max_staleness=2)
    ticket = one.admit()
    one.max_staleness = 0
    one.step = one.served_step = 2
    one.finish(ticket, scored(0, [0]))
    selection, dropped = one.select()
    assert selection is not None
    assert dropped == []


def test_ages_count_steps_of_the_surviving_history_not_versions() -> None:
    """After a rollback versions go on, and steps do not: version 3 holds the weights of step 1 again."""
    one = gate("drop", per_step=1, max_staleness=1)
    one.history = VersionHistory(steps=[0, 1, 2])
    one.history.roll_back(1)
    assert one.history.issue(1) == 3
    one.step = one.served_step = 2
    young, old = one.admit(), one.admit()
    one.finish(young, scored(young.number, [3]))
    one.finish(old, scored(old.number, [0]))
    taken, dropped = one.select()
    assert taken is not None
    assert taken.numbers == (young.number,)
    assert taken.groups[0].deadline == 2
    assert [drop.ticket.number for drop in dropped] == [old.number]


def test_its_state_goes_on_in_another_gate() -> None:
    one = gate(per_step=2, max_staleness=3)
    tickets = [one.admit() for _ in range(5)]
    for ticket in tickets[:3]:
        one.finish(ticket, scored(ticket.number, [0]))
    taken, _ = one.select()
    assert taken is not None
    state = codec.decode(codec.encode(one.state()), type(one.state()))
    other = gate(per_step=2, max_staleness=1)
    other.restore(state)
    assert (other.num_running, other.num_ready, other.outstanding, other.max_staleness) == (2, 3, 5, 3)
    assert not other.may_readmit()  # a step's worth of groups waits
    again, _ = other.select()
    assert again is not None
    assert again.numbers == taken.numbers
    other.trained(again)
    assert other.step == 1
    other.served_step = 1
    assert other.readmit(tickets[3]) == Ticket(number=3, bound=3, deadline=4)
    assert [ticket.number for ticket in other.state().running] == [4, 3]
    assert other.admit().number == 5


def test_a_group_that_goes_on_is_as_old_as_the_tokens_that_it_has() -> None:
    one = gate(per_step=2, max_staleness=3)
    ticket = one.admit()
    other = gate(per_step=2, max_staleness=3)
    other.history = VersionHistory(steps=[0, 1, 2, 2])
    other.restore(msgspec.structs.replace(one.state(), step=2, served_step=2))
    assert other.readmit(ticket, np.array([3, 1, 2, 99], np.int32)).deadline == 1 + 3


def test_a_group_that_a_rollback_returned_goes_first_and_is_never_late() -> None:
    """It was selected at step 5, and the run went back to step 3; whatever its bound, it trains as it was."""
    for late in ("mask", "drop", "wait"):
        one = gate(late, per_step=1, max_staleness=1)
        one.step = one.served_step = 3
        fresh = one.admit()
        one.finish(fresh, scored(fresh.number, [3]))
        state = one.state()
        old = ReadyGroup(
            ticket=Ticket(number=90, bound=0, deadline=1),
            scored=scored(90, [1, 1]),
            samples=(scored(90, [1, 1]).samples(0),),
            oldest_step=1,
            selected_at=5,
            steps_at_selection=(0, 1, 2, 3, 4, 5),
        )
        other = gate(late, per_step=1, max_staleness=1)
        other.restore(msgspec.structs.replace(state, ready=(*state.ready, old)))
        taken, dropped = other.select()
        assert taken is not None
        assert (taken.numbers, dropped) == ((90,), [])
        assert taken.groups[0].samples[0][0].num_loss_tokens == 2
        assert taken.groups[0].age_of(1) == 4


def test_a_rollback_while_generation_goes_on_returns_what_undone_steps_trained_on() -> None:
    one = gate(per_step=1, max_staleness=3)
    tickets = [one.admit() for _ in range(4)]
    train_one(one, tickets[0], [0])
    one.served_step = 1
    undone = ReadyGroup(
        ticket=tickets[1],
        scored=scored(1, [1]),
        samples=(scored(1, [1]).samples(0),),
        oldest_step=1,
        selected_at=1,
    )
    train_one(one, tickets[1], [1])
    one.served_step = 2
    one.finish(tickets[2], scored(2, [2]))
    under_way, _ = one.select()
    assert under_way is not None
    one.roll_back(1, consumed=((0, 0),), returned=[undone])
    state = one.state()
    assert (one.step, one.served_step, state.num_trained, state.consumed) == (1, 1, 1, ((0, 0),))
    assert {group.ticket.number: group.oldest_step for group in state.ready} == {1: 1, 2: 2}
    assert one.history.steps == (0, 1, 2, 3, 3, 3, 3, 3)  # two steps are made again
    assert [(ticket.number, ticket.deadline) for ticket in state.running] == [(3, 3)]
    again, _ = one.select()
    assert again is not None
    assert (again.step, again.numbers) == (1, (1,))
    one.trained(again)
    again, _ = one.select()
    assert again is not None
    assert (again.step, again.numbers, again.groups[0].selected_at) == (2, (2,), 2)
    assert again.groups[0].age_of(2) == 0


def test_a_step_that_nobody_trains_is_put_back() -> None:
    one = gate(per_step=2)
    tickets = [one.admit() for _ in range(2)]
    for ticket in tickets:
        one.finish(ticket, scored(ticket.number, [0]))
    taken, _ = one.select()
    assert taken is not None and (one.num_ready, one.outstanding) == (0, 2)
    one.put_back(taken)
    assert (one.num_ready, one.outstanding) == (2, 2)
    again, _ = one.select()
    assert again is not None and again.numbers == taken.numbers
    one.trained(again)
    one.put_back(again)  # they are trained: nothing comes back
    assert (one.num_ready, one.outstanding) == (0, 0)
