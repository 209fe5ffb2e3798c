"""`docs/api.md`: what a program can use of Penstock, in the order in which one comes to need it."""

import textwrap
from dataclasses import dataclass, field

from source_docs import WIDTH, Documented, Method, read

import penstock
from penstock.config.root import PenstockConfig

INTRO = """\
# API reference

Generated from docstrings by `make docs`; do not edit. [Tasks and rewards](tasks-and-rewards.md) explains the same
by example; the [configuration reference](configuration.md) has every setting. Records are frozen and take keyword
arguments only. `IntArray`, `FloatArray` and `BoolArray` are numpy arrays of int32, float32 and bool.
"""

REWARD = """\
A reward is a function; there is nothing to inherit from. Two forms are understood, and either may be `async`:

```python
def reward(task: Task, completion: str) -> float | Score          # once per answer, as soon as it has ended
def reward(task: Task, episode: Episode) -> float | Score         # the same, with all turns and tokens
def reward(prompts, completions, **columns) -> list[float]        # TRL's form: once per group
```

The second parameter of the plain form is the episode if it is named `episode`, and its text otherwise. In TRL's
form `columns` are the task's columns, repeated to the group's length. A parameter `device` gets `reward.device`.
What a function raises costs its group and nothing else.
"""

WORKFLOW = """\
Without a workflow an attempt is one turn. A workflow is `async def workflow(task, rollout)`, or an object with such
a method `run`. It returns an `Episode`; a `Turn`, which stands for itself and the turns that it continues; or
nothing, which stands for all turns that were made.
"""

ALONE = """\
An engine, a trainer, the staleness gate and weight sync work without a run: no run folder, no controller, no other
processes. [examples/library](../examples/library) has a program of at most 40 lines for each.

```python
import asyncio
import penstock


async def main():
    async with penstock.open_engine("builtin") as engine, penstock.open_trainer("builtin") as trainer:
        answers = await asyncio.gather(*(engine.answer("214+387=", max_tokens=5) for _ in range(8)))
        rewards = [float(answer.text == "601") for answer in answers]
        print(await trainer.step([penstock.ScoredGroup.of(answers, rewards)]))
        async with trainer.published() as update:
            await engine.update(update)


asyncio.run(main())
```
"""

PARTS = """\
An engine, a transport or a launcher of your own is a small record that the config names by path, `file.py:NAME` or
`module:NAME`. The record says how the part is made, and what a run must know before anything starts. The part
itself is a class with the methods below. This one is the embedded engine with a limit on the length of
every answer:

```python
import msgspec

from penstock.config import Section
from penstock.engines.kinds import EngineKind, EngineParts
from penstock.engines.embedded.embedded_kind import EMBEDDED


class Settings(Section):
    longest: int = 16


class ShortAnswers:
    def __init__(self, engine, longest):
        self.inner, self.longest = engine, longest

    def __getattr__(self, name):  # everything else is the inner engine's
        return getattr(self.inner, name)

    def generate(self, request):
        sampling = request.sampling
        most = min(sampling.max_tokens, self.longest)
        sampling = msgspec.structs.replace(sampling, max_tokens=most)
        return self.inner.generate(msgspec.structs.replace(request, sampling=sampling))


async def open_engine(parts: EngineParts):
    from penstock.engines.embedded.opening import open_embedded  # here, since the controller needs no torch

    return ShortAnswers(await open_embedded(parts), parts.settings.longest)


SHORT = EngineKind(opener=open_engine, settings=Settings, can=EMBEDDED.can)
```

```yaml
engine:
  kind: mine.py:SHORT
  settings:
    mine.py:SHORT: {longest: 3}
```

`plugins/sglang` is a larger example: servers that another program runs. `sync.transport` takes the path of a
`penstock.sync.transports.Transport`: a publisher for the trainer's side, a receiver for the engines', and what both
hold in memory. `launcher` takes the path of a `penstock.processes.launchers.launcher_kinds.LauncherKind`: an
async context manager that gives a `penstock.processes.launchers.Launcher`, which starts worker processes where
you want them. `penstock.processes.launchers.remote.RemoteLauncher` does that on other machines, given a
`Placer` that starts a program there.

Nothing is inherited. Each interface has an implementation in
memory that your tests can use: `penstock.engines.scripted.ScriptedEngine`,
`penstock.scoring.thread_scorer.MemoryScorer`, `penstock.blob_stores.MemoryBlobs`, and
`penstock.planner.simulation` for the rest, which runs a whole controller without a model.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A heading, words before its entries, and the entries as `module:name`."""

    title: str
    text: str = ""
    entries: tuple[str, ...]
    without: frozenset[str] = field(default_factory=frozenset)
    """Methods that only Penstock itself calls."""
    is_list: bool = False
    """Whether a line for each entry is enough."""


def _records(*names: str) -> tuple[str, ...]:
    """Those that `penstock` itself has are imported from there."""
    return tuple(f"penstock{'' if name in penstock.__all__ else '.records'}:{name}" for name in names)


def _interfaces(*names: str) -> tuple[str, ...]:
    return tuple(f"penstock.records.interfaces:{name}" for name in names)


ERRORS = (
    "PenstockError",
    "UserError",
    "ConfigError",
    "TaskError",
    "MissingExtraError",
    "Diverged",
    "WorkerDied",
)

BOOK = (
    Part(
        title="Training",
        entries=("penstock:train", "penstock:train_async", "penstock.run.summary:Summary"),
        without=frozenset({"rows", "write"}),
    ),
    Part(
        title="A part alone",
        text=ALONE,
        entries=(
            "penstock:open_engine",
            "penstock.library:OpenEngine",
            "penstock:open_trainer",
            "penstock.library:OpenTrainer",
        ),
    ),
    Part(title="Tasks", entries=_records("Task", "Message")),
    Part(
        title="Rewards",
        text=REWARD,
        entries=_records("Score", "StepScore", "TokenColumn"),
        without=frozenset({"misfit"}),
    ),
    Part(
        title="Workflows",
        text=WORKFLOW,
        entries=(
            "penstock.rollout.workflow:Workflow",
            "penstock.rollout.episode_rollout:Rollout",
            *_records("Turn", "Episode", "SamplingParams"),
        ),
        without=frozenset({"close", "draws_like", "not_replayed"}),
    ),
    Part(
        title="From episodes to a step",
        text="What lies between an answer and an optimizer step. Writers of losses and selections meet these.",
        entries=(
            *_records(
                "Group",
                "ScoredGroup",
                "Sample",
                "TurnSpan",
                "TrainSequence",
                "StepPlan",
                "StepResult",
                "TracedTokens",
                "CheckpointWritten",
            ),
            "penstock.records.metrics:Metric",
        ),
    ),
    Part(
        title="Work under way",
        text="What a run's journal keeps of groups that are not finished, so that a resumed run goes on with them.",
        entries=_records("WorkProgressed", "TurnPart", "CallAnswer", "EpisodeScore"),
    ),
    Part(
        title="Parts of your own",
        text=PARTS,
        entries=_interfaces(
            "Engine", "Scorer", "Trainer", "Tokenizer", "WeightPublisher", "WeightReceiver", "BlobStore"
        ),
    ),
    Part(
        title="What engines read and write",
        entries=_records(
            "GenerateRequest",
            "Parent",
            "Chunk",
            "EngineReport",
            "SamplingMask",
            "MaskRef",
            "RoutingRef",
            "RoutingShape",
            "BlobRef",
        ),
        without=frozenset({"bitmask_words"}),
    ),
    Part(
        title="Published weights",
        entries=(
            *_records("WeightUpdate", "TensorSpec", "Payload", "AdapterSpec", "UpdateReceipt"),
            "penstock.records.weights:Interrupt",
            "penstock.records.weights:UpdateSelection",
            "penstock.records.weights:Encoding",
        ),
    ),
    Part(
        title="Errors",
        text="All are in `penstock.errors`. The command line prints a `UserError` as one sentence.",
        entries=tuple(f"penstock.errors:{name}" for name in ERRORS),
        is_list=True,
    ),
)


def api_reference() -> str:
    """The page."""
    contents = [f"- [{part.title}](#{_anchor(part.title)})" for part in BOOK]
    lines = [INTRO, *contents, "- [Settings](#settings)", ""]
    for part in BOOK:
        lines += [f"## {part.title}", ""]
        lines += [part.text.strip(), ""] if part.text else []
        for entry in part.entries:
            found = read(entry)
            if part.is_list:
                lines.append(f"- `{found.name}`: {_cell(found.text)}")
            else:
                lines += _entry(found, entry, part.without)
        lines += [""] if part.is_list else []
    return "\n".join([*lines, *_settings()])


def _entry(found: Documented, path: str, without: frozenset[str]) -> list[str]:
    lines = [f"### `{path.replace(':', '.')}`", ""]
    if found.signature is not None:
        lines += ["```python", found.signature, "```", ""]
    lines += [found.text, ""] if found.text else []
    if found.fields:
        lines += ["| field | meaning |", "|---|---|"]
        lines += [f"| `{_cell(str(one))}` | {_cell(one.text)} |" for one in found.fields]
        lines.append("")
    shown = [method for method in found.methods if method.name not in without]
    if shown:
        lines += ["```python", "\n\n".join(map(_stub, shown)), "```", ""]
    return lines


def _stub(method: Method) -> str:
    """A method without its body, and what it is for as a comment."""
    comment = textwrap.wrap(" ".join(method.text.split()), WIDTH - 4)
    return "\n".join([method.signature, *(f"    # {line}" for line in comment)])


def _settings() -> list[str]:
    lines = ["## Settings", "", "Each section of the config is a keyword argument of `train`.", ""]
    for name, section in PenstockConfig.model_fields.items():
        meaning = " ".join((type(section.default).__doc__ or "").split())
        lines.append(f"- [`{name}`](configuration.md#{_anchor(name)}): {meaning}")
    return [*lines, ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
