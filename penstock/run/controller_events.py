"""Reports what the controller does as events: groups, steps, updates and waits. Drops are reported here and
nowhere else."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from penstock.algorithms.advantages import Values
from penstock.loop.admission import StalenessGate, StepGroups, Ticket
from penstock.loop.attempt_records import (
    AttemptRecord,
    GroupAdmitted,
    GroupDropped,
    GroupGenerated,
    GroupResumed,
    GroupScored,
)
from penstock.loop.attempts import Attempt, Attempts
from penstock.loop.edges import Delivered
from penstock.loop.step_planner import TrainedStep
from penstock.observe.event_stream import EventStream
from penstock.observe.events import Drop, StepEvent, TokensEvent, TokenTexts, UpdateEvent
from penstock.observe.slots import Slots
from penstock.records import Group, Score, ScoredGroup
from penstock.run.sample_events import sample_event, sampled_versions
from penstock.run.step_answers import (
    PROCESS,
    TokenVocabulary,
    staleness_of,
    step_metrics,
    traced_tokens,
)

GENERATION, SCORING, ADMISSION = "generation", "scoring", "admission"
"""What a trainer waits for until its last group is scored."""
JOURNAL, CONTROLLER = "journal", "controller"
"""What it waits for then: the disk, or, without a journal, that the controller sends the step."""


class ControllerEvents:
    """Emits events in the controller's name. `advantages` returns the advantages of a step's episodes, or None."""

    def __init__(
        self,
        stream: EventStream,
        gate: StalenessGate,
        attempts: Attempts,
        *,
        advantages: Callable[[Sequence[ScoredGroup]], Sequence[Values] | None],
        decode: Callable[[list[int]], str],
        has_journal: bool = False,
    ) -> None:
        """`decode` returns the text of tokens, with special tokens by name."""
        self.recorder = stream.of(PROCESS)
        self._attempts = attempts.by_number
        attempts.watchers.append(self._follow)
        self._decode = decode
        self._vocabulary = TokenVocabulary(decode)
        self._gate = gate
        self._last_wait = JOURNAL if has_journal else CONTROLLER
        self._advantages = advantages
        self._slots = Slots()
        self._producing: dict[int, int] = {}
        """The track of each group that is not in the buffer yet."""
        self._ready_slots = Slots()
        self._ready: dict[int, int] = {}
        """The track on which each scored group waits for its step."""

    def now(self) -> float:
        return self.recorder.now()

    def log(self, line: str) -> None:
        self.recorder.log(line)

    def measure(self, track: str, name: str, /, **attributes: int | str) -> AbstractContextManager[None]:
        return self.recorder.measure(track, name, **attributes)

    def admission_blocked(self, start: float, reason: str) -> None:
        """Record that nothing could be admitted since `start`. Waits of no length are not recorded."""
        if self.now() > start:
            self.recorder.span("admission", "blocked", start, reason=reason)

    def waited(self, start: float, taken: StepGroups) -> dict[str, float]:
        attempts = [self._attempts[number] for number in taken.numbers]
        waits = waits_of(attempts, start, self.now(), self._last_wait)
        self.recorder.span("train", "wait for groups", start, step=taken.step + 1, **waits)
        return waits

    def trained(self, step: TrainedStep, max_staleness: int) -> None:
        end = step.time_s
        self.recorder.span("train", "step", end - step.took_s, end, step=step.number)
        traced = self._tokens(step)
        groups = [group.scored for group in step.taken.groups]
        rewards = np.concatenate([scored.values for scored in groups])
        advantages: Sequence[Values | None] = self._advantages(groups) or [None] * len(groups)
        for ready, of_group in zip(step.taken.groups, advantages, strict=True):
            scored, age_of = ready.scored, ready.age_of
            self._samples(
                scored.group, scored.scores, of_group, age_of=age_of, step=step.number, traced=traced
            )
        self.recorder.emit(staleness_of(step.taken, self._attempts, end))
        for number in step.taken.numbers:
            self._end_wait(number, end - step.took_s, step=step.number)
        self.recorder.emit(
            StepEvent(
                process=PROCESS,
                time=end,
                step=step.number,
                reward=float(rewards.mean(dtype=np.float64)),
                num_samples=len(rewards),
                metrics=step_metrics(groups, step.metrics()),
                own_metrics=step.own_metrics(),
                seconds=step.seconds(),
                waited_s=step.waited_s,
                took_s=step.took_s,
                max_staleness=max_staleness,
                groups=step.taken.numbers,
                waits=step.waits,
            )
        )

    def dropped(self, group: Group, reason: str, message: str, scores: Sequence[Score] = ()) -> None:
        """Record that a group is not trained. `group` holds the episodes that had ended; `scores` are given if
        all were scored."""
        self._samples(group, scores, age_of=self._age_now, drop=reason)
        self._end_wait(group.number, self.now(), reason=reason)
        versions = sampled_versions((*group.episodes, *group.failures), self._gate.history.policy)
        self.recorder.emit(
            Drop(
                process=PROCESS,
                time=self.now(),
                group=group.number,
                task_id=group.task.id,
                reason=reason,
                message=message,
                age=self._age_now(min(versions)) if versions else None,
                num_tokens=sum(e.num_output_tokens for e in (*group.episodes, *group.failures)),
            )
        )

    def updated(self, delivered: Delivered) -> None:
        receipt = delivered.receipt
        self.recorder.emit(
            UpdateEvent(
                process=PROCESS,
                time=self.now(),
                policy=receipt.policy,
                version=receipt.version,
                snapshot_s=delivered.snapshot_s,
                publish_s=delivered.publish_s,
                stage_s=receipt.stage_s,
                stall_s=receipt.stall_s,
                verify_s=receipt.verify_s,
                fresh_s=delivered.fresh_s,
                drain_s=receipt.drain_s,
                recomputed_tokens=receipt.recomputed_tokens,
                discarded_tokens=receipt.discarded_tokens,
                num_bytes=delivered.num_bytes,
                num_skipped=delivered.num_skipped,
                step=self._gate.history.step_of(receipt.version),
            )
        )

    def _follow(self, record: AttemptRecord) -> None:
        """Record each stage of a group as a span when the group leaves it. Groups that run side by side have a
        track each."""
        match record:
            case GroupAdmitted(ticket=Ticket(number=number)) | GroupResumed(number=number):
                self._producing[number] = self._slots.take()
            case GroupGenerated(number=number):
                self._stage(number, "generate", self._attempts[number].began_s)
            case GroupScored(number=number) | GroupDropped(number=number) if number in self._producing:
                attempt = self._attempts[number]
                if attempt.generated_s is None:
                    self._stage(number, "generate", attempt.began_s)
                else:
                    self._stage(number, "score", attempt.generated_s)
                self._slots.give_back(self._producing.pop(number))
                if isinstance(record, GroupScored):
                    self._ready[number] = self._ready_slots.take()

    def _stage(self, group: int, name: str, start: float | None) -> None:
        assert start is not None, "what this process began has a time"
        self.recorder.span(f"slot {self._producing[group]}", name, start, group=group)

    def _tokens(self, step: TrainedStep) -> set[tuple[int, int]]:
        """Emit the tokens of the answers that the trainer returned. Return which these are, as group and
        episode."""
        tokens: list[TokensEvent] = list(traced_tokens(step, step.time_s))
        texts = self._vocabulary.new_texts(tokens)
        if texts:
            self.recorder.emit(TokenTexts(process=PROCESS, time=step.time_s, texts=texts))
        for event in tokens:
            self.recorder.emit(event)
        return {(event.group, event.episode) for event in tokens}

    def _end_wait(self, group: int, until: float, **attributes: int | str) -> None:
        slot, attempt = self._ready.pop(group, None), self._attempts.get(group)
        if slot is None:
            return
        self._ready_slots.give_back(slot)
        if attempt is not None and attempt.scored_s is not None:
            start = attempt.scored_s
            self.recorder.span(f"ready {slot}", "ready", start, max(start, until), group=group, **attributes)

    def _samples(
        self,
        group: Group,
        scores: Sequence[Score],
        advantages: Values | None = None,
        *,
        age_of: Callable[[int], int],
        step: int | None = None,
        drop: str | None = None,
        traced: set[tuple[int, int]] | None = None,
    ) -> None:
        now = self.now()
        for index, episode in enumerate((*group.episodes, *group.failures)):
            score = scores[index] if index < len(scores) else None
            advantage = None
            if advantages is not None and index < len(advantages):  # failed episodes come last, and have none
                advantage = float(advantages[index])
            self.recorder.emit(
                sample_event(
                    group,
                    episode,
                    score,
                    advantage=advantage,
                    time=now,
                    step=step,
                    drop=drop,
                    policy=self._gate.history.policy,
                    age_of=age_of,
                    traced=traced is not None and (group.number, episode.index) in traced,
                    decode=self._decode,
                )
            )

    def _age_now(self, version: int) -> int:
        """Return the present age of tokens that are not trained."""
        return max(0, self._gate.step - self._gate.history.step_of(version))


def waits_of(attempts: Sequence[Attempt], start: float, end: float, last_wait: str) -> dict[str, float]:
    """Split a wait for these groups by what the last of them to be scored was doing meanwhile. `last_wait` names
    the time after it was scored."""
    if end <= start:
        return {}
    last = max(attempts, key=_last_s, default=None)
    if last is None or last.began_s is None or last.generated_s is None:
        return {GENERATION: end - start}
    scored = last.generated_s if last.scored_s is None else last.scored_s
    bounds = [
        start,
        *(min(end, max(start, time)) for time in (last.began_s, last.generated_s, scored)),
        end,
    ]
    parts = zip((ADMISSION, GENERATION, SCORING, last_wait), bounds, bounds[1:], strict=False)
    return {cause: until - since for cause, since, until in parts if until > since}


def _last_s(attempt: Attempt) -> float:
    """Return when the attempt was scored, or generated. Attempts of an earlier process count as first."""
    return attempt.scored_s or attempt.generated_s or 0.0
