"""Folds the attempts of a run from their records: it alone defines their states and what may follow what.

    issued ─► running ─► generated ─► scored ─► trained@step
      └─────────┴────────────┴───────────┴────► dropped(reason)

An attempt is `issued` when it is admitted, `running` from the first token or episode in a record, and
`generated` when all its episodes are over. Records are written together, so an attempt may skip states.
`trained` is provisional until a checkpoint at or past its step is kept; a run that resumes from an older one
has the group `scored` again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from penstock.loop.admission import Ticket
from penstock.loop.attempt_records import (
    AttemptRecord,
    CheckpointKept,
    EpisodeEnded,
    GroupAdmitted,
    GroupDropped,
    GroupGenerated,
    GroupResumed,
    GroupScored,
    GroupsSelected,
    GroupsTrained,
    RunResumed,
    Standing,
    VersionIssued,
)
from penstock.loop.history import VersionHistory
from penstock.records import PartialGroup, Record, WorkProgressed


class AttemptState(StrEnum):
    """Names the stages of an attempt at a task."""

    ISSUED = "issued"
    RUNNING = "running"
    GENERATED = "generated"
    SCORED = "scored"
    TRAINED = "trained"
    DROPPED = "dropped"


ISSUED, RUNNING, GENERATED, SCORED, TRAINED, DROPPED = AttemptState
MAY_BECOME: dict[AttemptState, tuple[AttemptState, ...]] = {
    ISSUED: (RUNNING, GENERATED, SCORED, DROPPED),
    RUNNING: (GENERATED, SCORED, DROPPED),
    GENERATED: (SCORED, DROPPED),
    SCORED: (TRAINED, DROPPED),
    TRAINED: (),
    DROPPED: (),
}
"""Besides: a restart makes what is under way `issued` again, and a rollback makes `trained` `scored` again."""
UNDER_WAY = (ISSUED, RUNNING, GENERATED)
"""The states before `scored`. A resumed run continues such groups with what they have."""


@dataclass(slots=True)
class Attempt:
    """Holds what the records say about one attempt at a task."""

    ticket: Ticket
    task_id: str
    state: AttemptState = ISSUED
    step: int | None = None
    """The step that trained it."""
    reason: str = ""
    """Why it was dropped."""
    selected_at: int | None = None
    """The step of the weights for which it was first selected, once it has been."""
    steps_at_selection: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By policy, the step of every version, as it was when the group was first selected."""
    scored: GroupScored | None = None
    """What it consists of, where contents are kept."""
    partial: PartialGroup | None = None
    """What it has done while it runs, where contents are kept."""
    began_s: float | None = None
    """When this process admitted or resumed it. Times of earlier processes are None, here and below."""
    generated_s: float | None = None
    generated_at: int | None = None
    """The step of the trainer's weights then."""
    scored_s: float | None = None

    def is_over(self, step: int) -> bool:
        """Return whether no run that resumes from `step` or later can need it."""
        return self.state == DROPPED or (self.step is not None and self.step <= step)

    def trained_after(self, step: int) -> bool:
        return self.step is not None and self.step > step


class Forgotten(Record, frozen=True, kw_only=True):
    """Counts the groups that `Attempts.forget` removed, for example those of deleted journal segments."""

    standing: Standing = Standing()
    """What the records say at the end of the last removed segment."""
    trained: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    """By reason."""
    over: dict[int, int] = msgspec.field(default_factory=dict)
    """Removed groups that later segments still mention, each with the last segment that does."""


class Attempts:
    """Keeps all attempts of a run by the number of their group. `keeps_content` also keeps the groups
    themselves, for a run that resumes with them."""

    def __init__(self, forgotten: Forgotten | None = None, *, keeps_content: bool = False) -> None:
        self.forgotten = forgotten or Forgotten()
        self.standing = self.forgotten.standing
        self.by_number: dict[int, Attempt] = {}
        self.under_way: dict[int, Attempt] = {}
        """Those of them that are not scored yet."""
        self.num_left = 0
        """How often a group has left a stage so far: it was generated, scored or dropped."""
        self.watchers: list[Callable[[AttemptRecord], None]] = []
        """Called with every record once it is applied."""
        self._keeps_content = keeps_content
        self._now: Callable[[], float] | None = None

    def follow(self, now: Callable[[], float]) -> None:
        """Note the time of every record from now on, since it is made by this process. Contents are no longer
        kept, since the buffer has them."""
        self._keeps_content, self._now = False, now

    def apply(self, record: AttemptRecord) -> None:
        """Apply one record. Raises `ValueError` for a record that can't follow, and changes nothing then."""
        match record:
            case GroupAdmitted():
                self._admit(record)
            case GroupResumed():
                self._resume(record)
            case EpisodeEnded():
                self._end_episode(record)
            case WorkProgressed():
                self._progress(record)
            case GroupGenerated():
                self._generate(record)
            case GroupScored():
                self._score(record)
            case GroupsSelected():
                self._select(record)
            case GroupsTrained():
                self._train(record)
            case GroupDropped():
                self._drop(record)
            case VersionIssued():
                steps = self.standing.version_steps
                more = (*steps.get(record.policy, ()), record.step)
                self._stand(version_steps={**steps, record.policy: more})
            case RunResumed():
                self._roll_back(record)
            case CheckpointKept():
                self._release(record.step)
        for watch in self.watchers:
            watch(record)

    def forget_contents(self) -> None:
        """Forget the groups themselves: the buffer has them now."""
        for attempt in self.by_number.values():
            attempt.scored = attempt.partial = None

    def trained_after(self, step: int) -> list[Attempt]:
        return [one for one in self.by_number.values() if one.trained_after(step)]

    def counts(self) -> Counter[str]:
        """Count groups by state, forgotten ones included."""
        found = Counter[str](one.state.value for one in self.by_number.values())
        found.update({TRAINED: self.forgotten.trained, DROPPED: sum(self.forgotten.dropped.values())})
        return +found

    def drops(self) -> Counter[str]:
        """Count dropped groups by reason, forgotten ones included."""
        reasons = Counter(one.reason for one in self.by_number.values() if one.state == DROPPED)
        return reasons + Counter(self.forgotten.dropped)

    def num_again(self, step: int) -> int:
        """Return how many steps a run that resumes from `step` repeats with the groups selected for them."""
        returned = [one for one in self.by_number.values() if one.state == SCORED or one.trained_after(step)]
        return len({one.selected_at for one in returned} - {None})

    def forget(
        self, numbers: Sequence[int], standing: Standing | None = None, over: Mapping[int, int] | None = None
    ) -> None:
        """Keep only counts of groups that are over. A journal passes its totals at its new beginning, and the
        groups that its later segments still mention."""
        gone = [self.by_number.pop(number) for number in numbers]
        dropped = Counter(one.reason for one in gone if one.state == DROPPED)
        self.forgotten = Forgotten(
            standing=standing or self.standing,
            trained=self.forgotten.trained + sum(one.state == TRAINED for one in gone),
            dropped=dict(dropped + Counter(self.forgotten.dropped)),
            over=dict(over or {}),
        )

    def _admit(self, record: GroupAdmitted) -> None:
        number, now = record.ticket.number, self.standing
        if number in self.by_number:
            known = self.by_number[number].task_id
            raise ValueError(f"group {number} was admitted before, with task {known!r}")
        returned = list(now.returned)
        if record.num_taken == now.num_taken and record.task_id in returned:
            returned.remove(record.task_id)
        self._stand(
            num_admitted=max(now.num_admitted, number + 1),
            num_taken=max(now.num_taken, record.num_taken),
            returned=tuple(returned),
        )
        self.by_number[number] = self.under_way[number] = Attempt(
            record.ticket, record.task_id, began_s=self._moment()
        )

    def _resume(self, record: GroupResumed) -> None:
        for attempt in self._known((record.number,)):
            if attempt.state not in UNDER_WAY:
                raise ValueError(f"group {record.number} is {attempt.state}, so it can't be resumed")
            attempt.state, attempt.began_s = ISSUED, self._moment()

    def _end_episode(self, record: EpisodeEnded) -> None:
        for attempt in self._known((record.number,)):
            self._runs(attempt)
            if self._keeps_content and attempt.state in UNDER_WAY:
                _work_of(attempt).end_episode(record.episode)

    def _progress(self, record: WorkProgressed) -> None:
        """Note progress. Groups that have ended meanwhile are skipped: their own records say more."""
        for number in record.groups:
            attempt = self.under_way.get(number)
            if attempt is not None:
                self._runs(attempt)
                if self._keeps_content:
                    _work_of(attempt).add(number, record)

    def _runs(self, attempt: Attempt) -> None:
        if attempt.state == ISSUED:
            attempt.state = RUNNING

    def _generate(self, record: GroupGenerated) -> None:
        for attempt in self._move((record.number,), GENERATED):
            attempt.generated_s = self._moment()
            attempt.generated_at = None if self._now is None else self.standing.step

    def _score(self, record: GroupScored) -> None:
        for attempt in self._move((record.number,), SCORED):
            attempt.partial = None
            attempt.scored = record if self._keeps_content else None
            attempt.scored_s = self._moment()

    def _select(self, record: GroupsSelected) -> None:
        for attempt in self._known(record.numbers):
            self._set_age(attempt, record.step)

    def _set_age(self, attempt: Attempt, step: int) -> None:
        """Settle the age of a group at its first selection, for good."""
        if attempt.selected_at is None:
            attempt.selected_at = step
            if self._keeps_content:
                attempt.steps_at_selection = self.standing.version_steps

    def _train(self, record: GroupsTrained) -> None:
        for attempt in self._move(record.numbers, TRAINED):
            attempt.step = record.step
            self._set_age(attempt, record.step - 1)
        self._stand(step=record.step)

    def _drop(self, record: GroupDropped) -> None:
        for attempt in self._move((record.number,), DROPPED):
            attempt.reason = record.reason
            attempt.scored = attempt.partial = None
        if record.returns is not None:
            self._stand(returned=(*self.standing.returned, record.returns))

    def _roll_back(self, record: RunResumed) -> None:
        for attempt in self.trained_after(record.step):
            attempt.state, attempt.step = SCORED, None
        if record.standing is not None:
            self.standing = record.standing
        histories = [VersionHistory(policy, steps) for policy, steps in self.standing.version_steps.items()]
        for history in histories:
            history.roll_back(record.step, record.num_again)
        self._stand(step=record.step, version_steps={one.policy: one.steps for one in histories})

    def _release(self, step: int) -> None:
        self._stand(covered=max(step, self.standing.covered))
        for attempt in self.by_number.values():
            if attempt.is_over(step):
                attempt.scored, attempt.steps_at_selection = None, {}

    def _move(self, numbers: Iterable[int], state: AttemptState) -> list[Attempt]:
        """Change the state of all these attempts or of none; forgotten groups are skipped."""
        attempts = self._known(numbers)
        for attempt in attempts:
            if state not in MAY_BECOME[attempt.state]:
                raise ValueError(
                    f"group {attempt.ticket.number} is {attempt.state}, so it can't become {state}"
                )
        for attempt in attempts:
            attempt.state = state
            if state not in UNDER_WAY:
                self.under_way.pop(attempt.ticket.number, None)
        self.num_left += 0 if state == TRAINED else len(attempts)
        return attempts

    def _known(self, numbers: Iterable[int]) -> list[Attempt]:
        """Return the attempts of these numbers, without those that are forgotten."""
        attempts = []
        for number in numbers:
            attempt = self.by_number.get(number)
            if attempt is not None:
                attempts.append(attempt)
            elif number not in self.forgotten.over:
                raise ValueError(f"group {number} was never admitted, or ended long ago")
        return attempts

    def _moment(self) -> float | None:
        return None if self._now is None else self._now()

    def _stand(self, **changes: Any) -> None:
        self.standing = msgspec.structs.replace(self.standing, **changes)


def _work_of(attempt: Attempt) -> PartialGroup:
    if attempt.partial is None:
        attempt.partial = PartialGroup()
    return attempt.partial
