"""Warns, once for each cause, when a run has nothing to learn from (equal rewards, zero gradients) or its
numbers are not finite."""

from penstock.observe.events import AnyEvent, SampleEvent, StepEvent
from penstock.observe.recorder import Recorder

FLAT_GROUPS = 64
FLAT_STEPS = 5


class LearningSignal:
    """Watches samples and steps, as a `penstock.observe.event_stream.Reader`."""

    def __init__(self, events: Recorder) -> None:
        self._events = events
        self._group: int | None = None
        self._rewards: list[float] = []
        self._num_flat = 0
        self._num_zero = 0
        self._num_skipped: float | None = None
        self._said: set[str] = set()

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, SampleEvent):
            if event.group != self._group:  # samples of a group come one after the other
                self._end_group()
                self._group = event.group
            if event.reward is not None:
                self._rewards.append(event.reward)
        elif isinstance(event, StepEvent):
            self._num_zero = self._num_zero + 1 if event.metrics.get("grad_norm") == 0 else 0
            if self._num_zero >= FLAT_STEPS:
                self._say_zero_gradients()
            if event.metrics.get("nonfinite_logprobs"):
                self._say_nonfinite(event.step, event.metrics["nonfinite_logprobs"])
            self._watch_skipped(event.step, event.metrics.get("skipped_updates", 0.0))

    def close(self) -> None:
        pass

    def _end_group(self) -> None:
        rewards, self._rewards = self._rewards, []
        if len(rewards) < 2:
            return
        self._num_flat = self._num_flat + 1 if min(rewards) == max(rewards) else 0
        if self._num_flat >= FLAT_GROUPS:
            self._say_flat_rewards(rewards[0])

    def _say_flat_rewards(self, reward: float) -> None:
        self._say(
            "flat rewards",
            f"the rewards of each of the last {FLAT_GROUPS} groups were all the same (the last: {reward:g}), so "
            "there is nothing to learn from: the tasks are too hard or too easy for this model, or the reward does "
            "not recognise its answers; look at some answers, at rollout.temperature and rollout.max_new_tokens",
        )

    def _say_zero_gradients(self) -> None:
        self._say(
            "zero gradients",
            f"the gradient of the last {FLAT_STEPS} steps was zero, so the weights do not change: the advantages "
            "are all zero (rewards without variance), or every token is left out of the loss (too stale, masked)",
        )

    def _say_nonfinite(self, step: int, count: float) -> None:
        self._say(
            "not finite",
            f"{count:.0f} logprobs of step {step} were not finite, and their sequences are out of the loss: the "
            "weights diverge, or a number format overflows; lower trainer.learning_rate, look at engine.dtype and "
            "trainer.dtype. nonfinite_logprobs in metrics.jsonl counts them",
        )

    def _watch_skipped(self, step: int, count: float) -> None:
        before = self._num_skipped
        if before is None:  # a resumed run continues its count
            before = count if step > 1 else 0.0
        self._num_skipped = count
        if count > before:
            self._say(
                "skipped",
                f"the update of step {step} was skipped, since its loss or gradient was not finite; the weights "
                "are as before. If this repeats, lower trainer.learning_rate. metrics.jsonl counts skipped_updates",
            )

    def _say(self, what: str, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._events.log(line)
