"""Tells a curriculum what trained answers were worth."""

from penstock.observe.events import AnyEvent, SampleEvent
from penstock.tasks.curriculum import Curriculum


class RewardWatch:
    """`penstock.observe.event_stream.Reader`."""

    def __init__(self, curriculum: Curriculum) -> None:
        self._curriculum = curriculum

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, SampleEvent) and event.step is not None and event.reward is not None:
            self._curriculum.observe(event.task_id, event.reward)

    def close(self) -> None:
        pass
