"""A run that never was, of any length, written through the same store as a real one: to measure how quickly a long
run is read, drawn and exported."""

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock.observe.events import (
    AnyEvent,
    ConfigEvent,
    Counters,
    Drop,
    EvaluationEvent,
    PhaseEvent,
    RunEvent,
    SampleEvent,
    Span,
    StalenessEvent,
    StepEvent,
    TokensEvent,
    TokenTexts,
    UpdateEvent,
)
from penstock.observe.run_state import RunState
from penstock.observe.store.event_store import EventStore, budgets

STEP_S = 2.0
NUM_METRICS = 80
VOCABULARY = 500
CONTROLLER = "controller"


def write_made_run(
    folder: Path,
    *,
    steps: int,
    samples_per_step: int = 2,
    tokens_per_answer: int = 200,
    spans_per_step: int = 10,
    seed: int = 0,
    mb: float = 1000.0,
) -> Path:
    """`folder` with the events of a run. Each step has one group; with every tenth another one is dropped. `mb`
    bounds samples, tokens and spans each."""
    folder.mkdir(parents=True, exist_ok=True)
    state = RunState()
    store = EventStore(folder, state, budgets(samples_mb=mb, tokens_mb=mb, spans_mb=mb))
    made = MadeRun(steps, samples_per_step, tokens_per_answer, spans_per_step, seed)
    for event in made.events(folder):
        state.on(event)
        store.on(event)
    store.close()
    return folder


class MadeRun:
    def __init__(self, steps: int, samples: int, tokens: int, spans: int, seed: int) -> None:
        self._steps, self._samples, self._tokens, self._spans = steps, samples, tokens, spans
        self._random = random.Random(seed)
        self._columns = np.random.default_rng(seed)
        words = ("".join(self._random.choices(string.ascii_lowercase, k=5)) for _ in range(VOCABULARY))
        self._words = [f" {word}" for word in words]

    def events(self, folder: Path) -> Iterator[AnyEvent]:
        config = json.dumps({"run": {"name": folder.name, "steps": self._steps}})
        yield RunEvent(
            process=CONTROLLER,
            time=0.0,
            name=folder.name,
            folder=str(folder),
            steps=self._steps,
            wall_s=1.7e9,
        )
        yield ConfigEvent(process=CONTROLLER, time=0.0, config=config)
        yield PhaseEvent(process=CONTROLLER, time=0.0, phase="training")
        texts = dict(enumerate(self._words))
        yield TokenTexts(process=CONTROLLER, time=0.0, texts=texts)
        for step in range(1, self._steps + 1):
            yield from self._step(step)
        yield PhaseEvent(process=CONTROLLER, time=self._steps * STEP_S, phase="done")

    def _step(self, step: int) -> Iterator[AnyEvent]:
        end = step * STEP_S
        progress = step / self._steps
        for number in range(self._spans):
            start = end - STEP_S * (2 - number / self._spans)  # while the step before is trained
            yield Span(
                process="engine0",
                time=start + STEP_S / self._spans,
                track=f"slot {number % 4}",
                name="generate",
                start=start,
                attributes={"group": step, "request": f"g{step}.{number}.0"},
            )
        yield Span(
            process="trainer",
            time=end,
            track="step",
            name="step",
            start=end - STEP_S,
            attributes={"step": step},
        )
        yield Span(
            process="engine0",
            time=end + 0.1,
            track="update",
            name="update",
            start=end + 0.05,
            attributes={"version": step},
        )
        busy = {"busy_s": 1.5 * step, "tokens": 400.0 * step, "running": 3.0, "waiting": 1.0}
        yield Counters(process="engine0", time=end, values=busy)
        if step % 10 == 0:
            yield self._sample(step, 0, drop="stale")
            yield Drop(
                process=CONTROLLER,
                time=end,
                group=-step,
                task_id=f"task {step % 997}",
                reason="stale",
                message="made up",
                age=5,
                num_tokens=self._tokens,
            )
        for episode in range(self._samples):
            yield self._sample(step, episode)
        yield self._trace(step)
        ages = ((0, 1, 300), (1, 1, 80), (2, 1, 20))
        yield StalenessEvent(process=CONTROLLER, time=end, step=step, tokens=ages, groups=((3, 1),))
        yield self._step_event(step, progress)
        yield UpdateEvent(
            process=CONTROLLER,
            time=end + 0.1,
            policy="policy",
            version=step,
            step=step,
            stage_s=0.05,
            stall_s=0.004,
            verify_s=0.01,
        )
        if step % 500 == 0:
            yield EvaluationEvent(
                process=CONTROLLER, time=end, step=step, reward=progress, num_episodes=64, num_failed=0
            )

    def _step_event(self, step: int, progress: float) -> StepEvent:
        noise = self._random.random
        metrics = {f"metric_{number}": noise() for number in range(NUM_METRICS)}
        metrics |= {"kl": noise() / 100, "staleness_mean": 1 + noise(), "staleness_max": 3.0, "ess": 0.9}
        metrics |= {"answer_tokens_mean": float(self._tokens), "answer_tokens_max": 2.0 * self._tokens}
        metrics |= {"truncated_fraction": 0.01, "grad_norm": 1.0, "entropy": 1 - progress / 2}
        return StepEvent(
            process=CONTROLLER,
            time=step * STEP_S,
            step=step,
            reward=0.9 * progress + 0.1 * noise(),
            num_samples=self._samples,
            metrics=metrics,
            seconds={"prepare": 0.1, "forward": 0.5, "backward": 0.7, "optimizer": 0.1, "snapshot": 0.05},
            waited_s=0.4,
            took_s=1.6,
            max_staleness=4,
            groups=(step,),
            waits={"generation": 0.3, "scoring": 0.1},
        )

    def _sample(self, step: int, episode: int, drop: str | None = None) -> SampleEvent:
        reward = float(self._random.random() < step / self._steps)
        length = self._random.randint(1, 2 * self._tokens)
        return SampleEvent(
            process=CONTROLLER,
            time=step * STEP_S,
            group=step if drop is None else -step,
            episode=episode,
            task_id=f"task {step % 997}",
            step=step if drop is None else None,
            drop=drop,
            reward=reward,
            parts={"exact": reward, "form": 1.0},
            advantage=reward - 0.5,
            oldest_version=max(0, step - 3),
            newest_version=max(0, step - 1),
            num_turns=1,
            num_prompt_tokens=12,
            num_output_tokens=length,
            finish_reason="stop",
            prompt=f"What comes after {step}?",
            answer="".join(self._random.choices(self._words, k=min(length, self._tokens))),
            age=min(step - 1, 2) if drop is None else 5,
            traced=episode == 0 and drop is None,
        )

    def _trace(self, step: int) -> TokensEvent:
        count, made = self._tokens, self._columns
        versions = np.full(count, max(0, step - 2), "<i4")
        versions[count // 2 :] = max(0, step - 1)
        return TokensEvent(
            process=CONTROLLER,
            time=step * STEP_S,
            step=step,
            group=step,
            episode=0,
            sample=0,
            token_ids=made.integers(0, VOCABULARY, count).astype("<i4").tobytes(),
            versions=versions.tobytes(),
            ages=(step - 1 - versions).astype("<i4").tobytes(),
            loss_mask=np.ones(count, "u1").tobytes(),
            logprobs=(-made.exponential(size=count)).astype("<f4").tobytes(),
            gaps=(made.normal(size=count) / 20).astype("<f4").tobytes(),
            advantages=np.full(count, 0.5, "<f4").tobytes(),
            weights=np.ones(count, "<f4").tobytes(),
            clipped=(made.random(count) < 0.02).astype("u1").tobytes(),
        )
