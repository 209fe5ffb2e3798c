"""Runs `penstock samples`: what a model answered, and which rewards it got."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from penstock.durability.run_facts import read_facts
from penstock.errors import UserError
from penstock.observe.events import CONTEXT, SampleEvent, TurnText, as_fields
from penstock.observe.plain_text import plain_block, plain_line, without_middle
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.store.segments import FOLDER
from penstock.safe_files import replace_private

SHOWN_PROMPT, SHOWN_ANSWER = 240, 480
"""Characters shown of a prompt and of an answer; `--full` shows all that is kept."""
SHOWN_TURN, SHOWN_TURN_TEXTS = 160, 8
"""Characters shown of a text of several turns, and how many texts."""
SHOWN_PARTS = 8
SHOWN_BY_DEFAULT = 2
SHOWN_OF_A_STEP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Says which samples to show: how many of each kind, of all steps or of one."""

    best: int = 0
    worst: int = 0
    latest: int = 0
    step: int | None = None

    @property
    def names_nothing(self) -> bool:
        return not (self.best or self.worst or self.latest)


def print_samples(run: str, choice: Choice, *, full: bool, console: Console | None = None) -> None:
    console = console or Console()
    folder = run_folder(run)
    samples = list(read_samples(folder))
    if not samples:
        raise UserError(
            f"{folder} has no samples: a run keeps them while it trains, unless observe.samples_mb is 0"
        )
    for title, some in sections(samples, choice):
        console.print(Text(title, style="bold"))
        for sample in some:
            _print(console, sample, full=full)


def export_to_file(run: str) -> str:
    """Write all samples that are kept, one object a line, and return a line about it."""
    folder = run_folder(run)
    count = export_samples(folder, folder / NAME)
    return f"wrote {count} samples to {folder / NAME}"


def run_folder(run: str) -> Path:
    """Find a run by its folder, or by its name in `runs`. A run of an unknown format is refused."""
    tried = (Path(run), Path("runs") / run)
    folders = [folder for folder in tried if folder.is_dir()]
    if not folders:
        raise UserError(f"there is no run {run!r}: neither {tried[0]} nor {tried[1]} is a folder")
    found = find_run(run) or folders[0]
    read_facts(found)
    return found


def find_run(run: str) -> Path | None:
    """Return the folder of a run, if there is one. A folder of that name that is no run (`penstock export` makes
    one) does not hide it."""
    tried = (Path(run), Path("runs") / run)
    return next((folder for folder in tried if (folder / "config.yaml").is_file()), None)


def sections(samples: Sequence[SampleEvent], choice: Choice) -> Iterator[tuple[str, Sequence[SampleEvent]]]:
    """Yield the samples to show, under titles. Of equals the newest come first."""
    where = ""
    if choice.step is not None:
        samples, where = _of_step(samples, choice.step), f" of step {choice.step}"
        if choice.names_nothing:
            shown = samples[:SHOWN_OF_A_STEP]
            yield f"{len(shown)} of the {len(samples)} samples{where}", shown
            return
    elif choice.names_nothing:
        choice = Choice(best=SHOWN_BY_DEFAULT, worst=SHOWN_BY_DEFAULT, latest=SHOWN_BY_DEFAULT)
    newest = list(reversed(samples))
    if choice.best:
        yield f"best{where}", _by_reward(newest, sign=-1)[: choice.best]
    if choice.worst:
        yield f"worst{where}", _by_reward(newest, sign=1)[: choice.worst]
    if choice.latest:
        yield f"latest{where}", newest[: choice.latest]


def _by_reward(samples: Sequence[SampleEvent], *, sign: int) -> list[SampleEvent]:
    """Sort the scored samples, lowest first for `sign` 1. Equal ones take turns by group: ten attempts at one
    task say less than one at each of ten."""
    seen: Counter[tuple[int, float]] = Counter()
    ranked = []
    for sample in samples:
        if sample.reward is not None:
            place = (sample.group, sample.reward)
            ranked.append((sign * sample.reward, seen[place], sample))
            seen[place] += 1
    return [sample for *_, sample in sorted(ranked, key=lambda entry: entry[:2])]


def _of_step(samples: Sequence[SampleEvent], step: int) -> list[SampleEvent]:
    some = [sample for sample in samples if sample.step == step]
    if not some:
        steps = [sample.step for sample in samples if sample.step is not None]
        kept = f"steps {min(steps)} to {max(steps)} are there" if steps else "no step was trained yet"
        raise UserError(f"no sample of step {step} is kept; {kept}")
    return some


def facts(sample: SampleEvent) -> list[str]:
    """Return what is known of a sample besides its texts."""
    known = [f"dropped ({sample.drop})" if sample.step is None else f"step {sample.step}"]
    if sample.failure is not None:
        known.append(f"failed ({sample.failure})")
    if sample.reward is not None:
        known.append(f"reward {sample.reward:.4g}")
    parts = [f"{name} {value:.4g}" for name, value in sample.parts.items()]
    known += parts[:SHOWN_PARTS]
    if len(parts) > SHOWN_PARTS:
        known.append(f"{len(parts) - SHOWN_PARTS} more parts")
    if sample.advantage is not None:
        known.append(f"advantage {sample.advantage:+.3g}")
    finish = f", {sample.finish_reason}" if sample.finish_reason else ""
    turns = f" in {sample.num_turns} turns" if sample.num_turns > 1 else ""
    known.append(f"{sample.num_output_tokens} tokens{turns}{finish}")
    if sample.oldest_version is not None and sample.newest_version is not None:
        oldest, newest = sample.oldest_version, sample.newest_version
        known.append(f"version {newest}" if oldest == newest else f"versions {oldest}–{newest}")
    return [*known, f"task {sample.task_id}"]


def _print(console: Console, sample: SampleEvent, *, full: bool) -> None:
    for line in _lines([plain_line(fact, 70) for fact in facts(sample)], console.width):
        console.print(Text(line, style="cyan"), soft_wrap=True)
    _print_text(
        console, f"prompt{' ' if sample.turns else ''}", sample.prompt, None if full else SHOWN_PROMPT
    )
    if sample.failure is not None:
        _print_text(console, "error", sample.message, None if full else SHOWN_ANSWER)
    if sample.turns:
        _print_turns(console, sample.turns, full=full)
    else:
        _print_text(console, "answer", sample.answer, None if full else SHOWN_ANSWER)
    for name, text in sample.extra.items():
        _print_text(console, plain_line(name, 70), text, None if full else SHOWN_TURN)
    console.print()


def _print_turns(console: Console, turns: Sequence[TurnText], *, full: bool) -> None:
    """Print what was read and sampled in each turn; unless `full`, the prompt stands for the first context."""
    if full:
        for one in turns:
            _print_text(console, one.label, one.text, None)
        return
    _, *texts = turns
    left = len(texts) - SHOWN_TURN_TEXTS
    for number, one in enumerate(texts):
        if left <= 0 or number < SHOWN_TURN_TEXTS - 1 or number == len(texts) - 1:
            _print_text(console, f"{one.role:{len(CONTEXT)}}", one.text, SHOWN_TURN)
        elif number == SHOWN_TURN_TEXTS - 1:
            console.print(Text(f"  … {left} more (--full)", style="dim"))


def _lines(words: Sequence[str], width: int) -> Iterator[str]:
    """Join facts into lines; a fact that does not fit begins the next line."""
    line = ""
    for word in words:
        if line and len(line) + len(word) + 3 > width:
            yield line
            line = f"  {word}"
        else:
            line = f"{line} · {word}" if line else word
    yield line


def _print_text(console: Console, label: str, text: str, limit: int | None) -> None:
    if limit is None:
        console.print(Text(f"  {label}", style="dim"))
        console.print(Padding(Text(plain_block(text), overflow="fold"), (0, 0, 0, 4), expand=False))
        return
    shown = plain_line(without_middle(text, limit))
    console.print(
        Padding(Text.assemble((f"{label}  ", "dim"), shown, overflow="fold"), (0, 0, 0, 2), expand=False)
    )


NAME = "samples.jsonl"


def read_samples(folder: Path) -> Iterator[SampleEvent]:
    """Yield all samples that are kept of a run, oldest first, including those of undone steps."""
    if not (folder / FOLDER).is_dir():
        return
    run = RunReading(folder)
    run.refresh()
    for row in range(len(run.samples)):
        yield run.samples.read(row)


def export_samples(folder: Path, path: Path) -> int:
    """Write all samples to a file, whole or not at all, and return their number."""
    count = 0

    def lines() -> Iterator[bytes]:
        nonlocal count
        for sample in read_samples(folder):
            count += 1
            yield encode_sample(sample)

    replace_private(path, lines())
    return count


def encode_sample(event: SampleEvent) -> bytes:
    """Encode a sample as a line of JSON. A lone surrogate, which UTF-8 lacks, is escaped as JSON does."""
    fields = as_fields(event)
    try:
        return msgspec.json.encode(fields) + b"\n"
    except UnicodeEncodeError:
        line = json.dumps(msgspec.to_builtins(fields), ensure_ascii=False)
        return line.encode("utf-8", "backslashreplace") + b"\n"
