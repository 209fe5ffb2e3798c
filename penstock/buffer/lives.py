"""The life of every group, folded from the records of the journal: the one definition of what may follow what.

    issued ─► running ─► finished ─► scored ─► trained@step
      └─────────┴───────────┴──────────┴─────► dropped(reason)

An attempt is `issued` when it is admitted, `running` from its first token or episode that the journal has, and
`finished` when all its episodes have ended well. Records are written together, so states may be passed over.
`trained` is provisional until a checkpoint at or past its step is kept; a run that goes on from an older one has
the group `scored` again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from penstock.buffer.admission import Ticket
from penstock.buffer.history import VersionHistory
from penstock.buffer.life_records import (
    CheckpointKept,
    EpisodeEnded,
    GroupAdmitted,
    GroupDropped,
    GroupScored,
    GroupsSelected,
    GroupsTrained,
    LifeRecord,
    RunResumed,
    Standing,
    VersionIssued,
    WorkProgressed,
)
from penstock.types import Episode, PartialGroup, Record

State = Literal["issued", "running", "finished", "scored", "trained", "dropped"]
MAY_BECOME: dict[State, tuple[State, ...]] = {
    "issued": ("running", "finished", "scored", "dropped"),
    "running": ("finished", "scored", "dropped"),
    "finished": ("scored", "dropped"),
    "scored": ("trained", "dropped"),
    "trained": (),
    "dropped": (),
}
"""Only a run that goes on from an older checkpoint makes `trained` `scored` again."""
UNDER_WAY: tuple[State, ...] = ("issued", "running", "finished")
"""Not scored yet: a run that goes on begins there again, with what it has."""


@dataclass(slots=True)
class Life:
    """What is known of one attempt at a task."""

    ticket: Ticket
    task_id: str
    first_segment: int
    last_segment: int
    size: int = 0
    """How many episodes it has; 0 where the journal does not say."""
    state: State = "issued"
    ended: set[int] = field(default_factory=set)
    """The episodes that have ended well, while it runs."""
    step: int | None = None
    """That trained it."""
    reason: str = ""
    selected_at: int | None = None
    """The step of the weights for which it was first selected, once it has been."""
    steps_at_selection: tuple[int, ...] = ()
    """The step of every version, as it was when the group was first selected."""
    scored: GroupScored | None = None
    episodes: dict[int, Episode] = field(default_factory=dict)
    """Those that ended before the group did, by their index."""
    partial: PartialGroup = field(default_factory=PartialGroup)
    """What else it has done, while it runs."""


class Forgotten(Record, frozen=True, kw_only=True):
    """What stands for segments of the journal that are gone."""

    standing: Standing = Standing()
    """At the end of the last of them."""
    trained: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    """By reason."""
    over: dict[int, int] = msgspec.field(default_factory=dict)
    """Groups that are counted above and of which later segments still speak, each with the last that does."""


class Lives:
    """All lives. `keeps_content` keeps what groups consist of, for whoever goes on with them."""

    def __init__(self, forgotten: Forgotten | None = None, *, keeps_content: bool = False) -> None:
        self.forgotten = forgotten or Forgotten()
        self.standing = self.forgotten.standing
        self.by_number: dict[int, Life] = {}
        self.keeps_content = keeps_content
        self._segment = 0
        self._starts: dict[int, Standing] = {}
        """The standing at the beginning of every segment."""

    def apply(self, record: LifeRecord, segment: int = 0) -> Sequence[int]:
        """The groups that it changed. Raises `ValueError` for what can't follow, and changes nothing then."""
        if segment != self._segment:
            self._segment = segment
            self._starts[segment] = self.standing
        match record:
            case GroupAdmitted():
                return self._admit(record, segment)
            case EpisodeEnded():
                return self._end_episode(record, segment)
            case WorkProgressed():
                return self._progress(record, segment)
            case GroupScored():
                return self._score(record, segment)
            case GroupsSelected():
                return self._select(record, segment)
            case GroupsTrained():
                return self._train(record, segment)
            case GroupDropped():
                return self._drop(record, segment)
            case VersionIssued():
                self._stand(version_steps=(*self.standing.version_steps, record.step))
            case RunResumed():
                return self._roll_back(record)
            case CheckpointKept():
                self._release(record.step)
        return ()

    def let_go(self) -> None:
        """What groups consist of is with somebody else now."""
        for life in self.by_number.values():
            life.scored = None
            _clear(life)

    def counts(self) -> Counter[str]:
        """Groups by state, forgotten ones included."""
        found = Counter[str](life.state for life in self.by_number.values())
        found.update({"trained": self.forgotten.trained, "dropped": sum(self.forgotten.dropped.values())})
        return +found

    def drops(self) -> Counter[str]:
        """Dropped groups by reason, forgotten ones included."""
        reasons = Counter(life.reason for life in self.by_number.values() if life.state == "dropped")
        return reasons + Counter(self.forgotten.dropped)

    def num_again(self, step: int) -> int:
        """How many steps a run that goes on from `step` makes again, from the groups selected for them."""
        returned = [
            life
            for life in self.by_number.values()
            if life.state == "scored"
            or (life.state == "trained" and life.step is not None and life.step > step)
        ]
        return len({life.selected_at for life in returned} - {None})

    def forget_before(self, step: int) -> tuple[int, list[int]]:
        """The first segment that is still needed when no run goes on from before `step`, and the groups that begin
        before it: they are only counted from now on."""
        needed = [life.first_segment for life in self.by_number.values() if not _is_over(life, step)]
        first = min([self._segment, *needed])
        gone = [number for number, life in self.by_number.items() if life.first_segment < first]
        if first not in self._starts:
            return first, []
        lives = [self.by_number.pop(number) for number in gone]
        over = self.forgotten.over | {life.ticket.number: life.last_segment for life in lives}
        self.forgotten = Forgotten(
            standing=self._starts[first],
            trained=self.forgotten.trained + sum(life.state == "trained" for life in lives),
            dropped=dict(
                Counter(self.forgotten.dropped)
                + Counter(life.reason for life in lives if life.state == "dropped")
            ),
            over={number: last for number, last in over.items() if last >= first},
        )
        self._starts = {segment: start for segment, start in self._starts.items() if segment >= first}
        return first, gone

    def _admit(self, record: GroupAdmitted, segment: int) -> Sequence[int]:
        number, now = record.ticket.number, self.standing
        if number in self.by_number:
            raise ValueError(
                f"group {number} was admitted before, with task {self.by_number[number].task_id!r}"
            )
        returned = list(now.returned)
        if record.num_taken == now.num_taken and record.task_id in returned:
            returned.remove(record.task_id)
        self._stand(
            num_admitted=max(now.num_admitted, number + 1),
            num_taken=max(now.num_taken, record.num_taken),
            returned=tuple(returned),
        )
        self.by_number[number] = Life(record.ticket, record.task_id, segment, segment, record.size)
        return (number,)

    def _end_episode(self, record: EpisodeEnded, segment: int) -> Sequence[int]:
        if record.number in self.forgotten.over:
            return ()
        life = self._life(record.number)
        if life.state not in UNDER_WAY:
            return ()
        life.last_segment = segment
        life.ended.add(record.episode.index)
        if self.keeps_content:
            life.episodes[record.episode.index] = record.episode
            life.partial.end_episode(record.episode.index)
        is_whole = life.size and len(life.ended) >= life.size
        return self._go_on([life], "finished" if is_whole else "running", segment)

    def _progress(self, record: WorkProgressed, segment: int) -> Sequence[int]:
        """Of groups that have ended meanwhile there is more to know elsewhere."""
        found = {number: self.by_number.get(number) for number in record.groups}
        running = {number: life for number, life in found.items() if life and life.state in UNDER_WAY}
        for life in running.values():
            life.last_segment = segment
        begun = self._go_on([life for life in running.values() if life.state == "issued"], "running", segment)
        if not self.keeps_content:
            return begun
        for part in record.turns:
            if part.group in running:
                running[part.group].partial.add_part(part)
        for answer in record.calls:
            if answer.group in running:
                running[answer.group].partial.add_call(answer)
        for one in record.scores:
            if one.group in running:
                running[one.group].partial.scores[one.episode] = one.score
        return begun

    def _go_on(self, lives: Sequence[Life], state: State, segment: int) -> Sequence[int]:
        """Those whose state that is not yet."""
        changed = [life.ticket.number for life in lives if life.state != state]
        self._move(changed, state, segment)
        return changed

    def _score(self, record: GroupScored, segment: int) -> Sequence[int]:
        moved = self._move((record.number,), "scored", segment)
        for life in moved:
            _clear(life)
            life.ended.clear()
            life.scored = record if self.keeps_content else None
        return [life.ticket.number for life in moved]

    def _select(self, record: GroupsSelected, segment: int) -> Sequence[int]:
        lives = [self._life(number) for number in record.numbers if number not in self.forgotten.over]
        for life in lives:
            life.last_segment = segment
            self._set_age(life, record.step)
        return [life.ticket.number for life in lives]

    def _set_age(self, life: Life, step: int) -> None:
        """As of the first selection, for good."""
        if life.selected_at is None:
            life.selected_at = step
            life.steps_at_selection = self.standing.version_steps if self.keeps_content else ()

    def _train(self, record: GroupsTrained, segment: int) -> Sequence[int]:
        moved = self._move(record.numbers, "trained", segment)
        for life in moved:
            life.step = record.step
            self._set_age(life, record.step - 1)
        self._stand(step=record.step)
        return [life.ticket.number for life in moved]

    def _drop(self, record: GroupDropped, segment: int) -> Sequence[int]:
        moved = self._move((record.number,), "dropped", segment)
        for life in moved:
            life.reason, life.scored = record.reason, None
            _clear(life)
            life.ended.clear()
        if record.returns is not None:
            self._stand(returned=(*self.standing.returned, record.returns))
        return [life.ticket.number for life in moved]

    def _roll_back(self, record: RunResumed) -> Sequence[int]:
        touched, step = [], record.step
        for number, life in self.by_number.items():
            if life.state == "trained" and life.step is not None and life.step > step:
                life.state, life.step = "scored", None
                touched.append(number)
        if record.standing is not None:
            self.standing = record.standing
        history = VersionHistory(steps=self.standing.version_steps)
        history.roll_back(step, record.num_again)
        self._stand(step=step, version_steps=history.steps)
        return touched

    def _release(self, step: int) -> None:
        self._stand(covered=max(step, self.standing.covered))
        for life in self.by_number.values():
            if _is_over(life, step):
                life.scored, life.steps_at_selection = None, ()

    def _move(self, numbers: Sequence[int], state: State, segment: int) -> list[Life]:
        """All of them or none; groups that are forgotten are passed over."""
        lives = [self._life(number) for number in numbers if number not in self.forgotten.over]
        for life in lives:
            if state not in MAY_BECOME[life.state]:
                raise ValueError(f"group {life.ticket.number} is {life.state}, so it can't become {state}")
        for life in lives:
            life.state, life.last_segment = state, segment
        return lives

    def _life(self, number: int) -> Life:
        life = self.by_number.get(number)
        if life is None:
            raise ValueError(f"group {number} was never admitted, or ended long ago")
        return life

    def _stand(self, **changes: Any) -> None:
        self.standing = msgspec.structs.replace(self.standing, **changes)


def _clear(life: Life) -> None:
    """It does not run any more, or somebody else has what it was doing."""
    life.episodes.clear()
    life.partial = PartialGroup()


def _is_over(life: Life, step: int) -> bool:
    """Whether no run that goes on from `step` or later can need it."""
    is_trained = life.state == "trained" and life.step is not None and life.step <= step
    return is_trained or life.state == "dropped"
