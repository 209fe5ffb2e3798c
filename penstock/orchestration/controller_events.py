"""What the controller tells: groups, steps, updates and waits, as events. Drops are told here and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.buffer.admission import StalenessGate
from penstock.observe.event_stream import EventStream
from penstock.observe.events import Drop, SampleEvent, StepEvent, UpdateEvent
from penstock.observe.plain_text import without_middle
from penstock.observe.slots import Slots
from penstock.orchestration.answer_metrics import step_metrics
from penstock.orchestration.step_planner import TrainedStep
from penstock.types import NOT_SAMPLED, Episode, Group, Score, UpdateReceipt

PROCESS = "controller"
KEPT_TEXT = 2000
"""Characters of a prompt or an answer that a sample keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A version that every engine serves, and what that took."""

    receipt: UpdateReceipt
    snapshot_s: float
    publish_s: float
    fresh_s: float
    num_bytes: int
    num_skipped: int


class ControllerEvents:
    """Emits in the controller's name."""

    def __init__(self, stream: EventStream, gate: StalenessGate) -> None:
        self.recorder = stream.of(PROCESS)
        self._gate = gate
        self._slots = Slots()

    def now(self) -> float:
        return self.recorder.now()

    def begin_group(self) -> int:
        """A slot for a group, so that the spans of groups that run side by side have a track each."""
        return self._slots.take()

    def end_group(self, slot: int) -> None:
        self._slots.give_back(slot)

    def group_span(self, slot: int, name: str, start: float, group: int) -> None:
        self.recorder.span(f"slot {slot}", name, start, group=group)

    def admission_blocked(self, start: float, reason: str) -> None:
        """Nothing could be admitted since `start`. Waits that took no time are not told."""
        if self.now() > start:
            self.recorder.span("admission", "blocked", start, reason=reason)

    def trained(self, step: TrainedStep, max_staleness: int) -> None:
        end = step.time_s
        self.recorder.span("train", "step", end - step.took_s, end, step=step.number)
        groups = [group.scored for group in step.taken.groups]
        rewards = np.concatenate([scored.values for scored in groups])
        for scored in groups:
            self._samples(scored.group, scored.scores, step=step.number)
        self.recorder.emit(
            StepEvent(
                process=PROCESS,
                time=end,
                step=step.number,
                reward=float(rewards.mean()),
                num_samples=len(rewards),
                metrics=step_metrics(groups, step.metrics()),
                seconds=step.seconds(),
                waited_s=step.waited_s,
                took_s=step.took_s,
                max_staleness=max_staleness,
            )
        )

    def dropped(self, group: Group, reason: str, message: str, scores: Sequence[Score] = ()) -> None:
        """A group goes untrained. It has the episodes that had ended, and scores if all were scored."""
        self._samples(group, scores, drop=reason)
        self.recorder.emit(
            Drop(
                process=PROCESS,
                time=self.now(),
                group=group.number,
                task_id=group.task.id,
                reason=reason,
                message=message,
                age=self._age(group),
                num_tokens=sum(e.num_output_tokens for e in (*group.episodes, *group.failures)),
            )
        )

    def updated(self, delivered: "Delivered") -> None:
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
            )
        )

    def _samples(
        self, group: Group, scores: Sequence[Score], *, step: int | None = None, drop: str | None = None
    ) -> None:
        now = self.now()
        for index, episode in enumerate((*group.episodes, *group.failures)):
            score = scores[index] if index < len(scores) else None
            self.recorder.emit(sample_event(group, episode, score, time=now, step=step, drop=drop))

    def _age(self, group: Group) -> int | None:
        versions = sampled_versions((*group.episodes, *group.failures))
        if not versions:
            return None
        return self._gate.step - self._gate.history.step_of(min(versions))


def sample_event(
    group: Group, episode: Episode, score: Score | None, *, time: float, step: int | None, drop: str | None
) -> SampleEvent:
    versions = sampled_versions((episode,))
    prompt = group.task.prompt
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message.role}: {message.content}" for message in prompt)
    return SampleEvent(
        process=PROCESS,
        time=time,
        group=group.number,
        episode=episode.index,
        task_id=group.task.id,
        step=step,
        drop=drop,
        failure=episode.failure,
        message=without_middle(episode.message, KEPT_TEXT),
        reward=None if score is None else score.value,
        parts={} if score is None else score.parts,
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        num_turns=len(episode.turns),
        num_prompt_tokens=len(episode.turns[0].prompt_ids) if episode.turns else 0,
        num_output_tokens=episode.num_output_tokens,
        finish_reason=episode.turns[-1].finish_reason if episode.turns else "",
        prompt=without_middle(prompt, KEPT_TEXT),
        answer=without_middle(episode.text, KEPT_TEXT),
    )


def sampled_versions(episodes: Sequence[Episode]) -> tuple[int, ...]:
    """The oldest and the newest version of every turn of these episodes. Within a turn they only grow."""
    arrays = [turn.versions for episode in episodes for turn in episode.turns]
    ends = [int(versions[end]) for versions in arrays if versions.size for end in (0, -1)]
    return tuple(version for version in ends if version != NOT_SAMPLED)
