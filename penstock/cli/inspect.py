"""`penstock inspect`: what became of the groups of a run, from its ledger and its journal."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.buffer.durable_log import FOLDER, LEDGER, read_lives
from penstock.buffer.journal.journal_files import DiskFiles
from penstock.buffer.journal.replay import replay
from penstock.buffer.ledger import LedgerCounts
from penstock.buffer.life_records import (
    EpisodeEnded,
    GroupAdmitted,
    GroupDropped,
    GroupScored,
    GroupsTrained,
    LifeRecord,
    RunResumed,
    WorkProgressed,
    from_bytes,
)
from penstock.cli.samples import run_folder
from penstock.errors import UserError
from penstock.observe.plain_text import plain_block, plain_line
from penstock.types import Episode, Message, Score

STATES = ("issued", "running", "finished", "scored", "trained", "dropped")
MEANS = {
    "issued": "admitted, and nothing of them is written yet",
    "running": "being generated",
    "finished": "being scored",
    "scored": "waiting for their step",
    "trained": "in the weights",
    "dropped": "left without being trained",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is known of all groups, in numbers."""

    states: Counter[str]
    drops: Counter[str]
    oldest: dict[str, tuple[int, str]]
    """Of every state: the number and the task of its first group."""


def print_run(run: str, *, group: int | None, console: Console | None = None) -> None:
    console = console or Console()
    journal = run_folder(run) / FOLDER
    if not journal.is_dir():
        raise UserError(
            f"{journal.parent} has no journal: a run keeps one when it has checkpoints (run.checkpoint_every), "
            "unless run.journal=false"
        )
    if group is None:
        _print_counts(console, counted(journal))
    else:
        _print_life(console, group, life_of(journal, group))


def counted(journal: Path) -> Shown:
    """From the ledger; from the journal itself when the ledger is missing, broken or behind."""
    files = DiskFiles(journal)
    with suppress(UserError, sqlite3.Error):
        counts = LedgerCounts(journal / LEDGER)
        if counts.sequence >= replay(files, lambda record, segment: None).sequence:
            return Shown(states=counts.states, drops=counts.drops, oldest=counts.oldest)
    lives = read_lives(files, keeps_content=False)
    oldest: dict[str, tuple[int, str]] = {}
    for number, life in sorted(lives.by_number.items()):
        oldest.setdefault(life.state, (number, life.task_id))
    return Shown(states=lives.counts(), drops=lives.drops(), oldest=oldest)


def life_of(journal: Path, number: int) -> list[LifeRecord]:
    """What the journal holds of one group, oldest first; also the rollbacks that undid its training."""
    found: list[LifeRecord] = []
    trained: int | None = None

    def look(data: bytes, segment: int) -> None:
        nonlocal trained
        record = from_bytes(data)
        if _is_of(record, number):
            found.append(record)
            trained = record.step if isinstance(record, GroupsTrained) else trained
        elif isinstance(record, RunResumed) and trained is not None and trained > record.step:
            found.append(record)
            trained = None

    replay(DiskFiles(journal), look)
    if not found:
        raise UserError(
            f"the journal has no group {number}: it was never admitted, or a checkpoint has covered it since"
        )
    return found


def _is_of(record: LifeRecord, number: int) -> bool:
    match record:
        case GroupAdmitted():
            return record.ticket.number == number
        case GroupsTrained():
            return number in record.numbers
        case GroupScored() | GroupDropped() | EpisodeEnded():
            return record.number == number
        case WorkProgressed():
            return number in record.groups
    return False


def _print_counts(console: Console, counts: Shown) -> None:
    table = Table(title=f"{counts.states.total():,} groups", title_justify="left")
    for name in ("state", "groups", "oldest"):
        table.add_column(name, justify="right" if name == "groups" else "left")
    for state in STATES:
        if counts.states[state]:
            number, task = counts.oldest.get(state, (None, ""))
            oldest = "" if number is None else plain_line(f"{number} (task {task})", 30)
            table.add_row(Text(f"{state}: {MEANS.get(state, '')}"), f"{counts.states[state]:,}", Text(oldest))
    console.print(table)
    if counts.drops:
        console.print("dropped for")
        for reason, count in counts.drops.most_common():
            console.print(Text(f"  {count:>8,}  {plain_line(reason, 60)}"))


def _print_life(console: Console, number: int, records: list[LifeRecord]) -> None:
    console.print(Text(f"group {number}", style="bold"))
    is_scored = any(isinstance(record, GroupScored) for record in records)
    is_over = is_scored or any(isinstance(record, GroupDropped) for record in records)
    for record in records:
        match record:
            case GroupAdmitted():
                bound = record.ticket.bound
                _say(console, f"admitted: task {record.task_id}, at most {bound} updates old")
                _text(console, _prompt(record.prompt))
            case EpisodeEnded() if not is_scored:
                _print_episode(console, record.episode, None)
            case GroupScored():
                _print_scored(console, record)
            case GroupsTrained():
                _say(console, f"trained in step {record.step}")
            case GroupDropped():
                again = "" if record.returns is None else "; its task goes back"
                _say(console, f"dropped: {record.reason}{again}")
            case RunResumed():
                _say(console, f"waits again: the run went back to step {record.step}")
    if not is_over:
        for line in _under_way(number, records):
            _say(console, line)


def _under_way(number: int, records: list[LifeRecord]) -> Iterator[str]:
    """Episodes that have not ended: how many tokens are safe in the journal. There is no text of them yet."""
    ended = {one.episode.index for one in records if isinstance(one, EpisodeEnded)}
    turns: dict[int, dict[int, int]] = {}
    for record in records:
        if isinstance(record, WorkProgressed):
            for part in record.turns:
                if part.group == number and part.episode not in ended:
                    turns.setdefault(part.episode, {})[part.turn] = part.end
    for episode, ends in sorted(turns.items()):
        yield f"episode {episode} is under way: {sum(ends.values())} tokens kept, in turn {max(ends) + 1}"


def _print_scored(console: Console, record: GroupScored) -> None:
    group = record.scored.group
    failed = f", {len(group.failures)} failed" if group.failures else ""
    _say(console, f"finished and scored: {len(group.episodes)} episodes{failed}")
    for episode, score in zip(group.episodes, record.scored.scores, strict=True):
        _print_episode(console, episode, score)
    for episode in group.failures:
        _print_episode(console, episode, None)


def _print_episode(console: Console, episode: Episode, score: Score | None) -> None:
    versions = sorted({int(one) for turn in episode.turns for one in turn.versions})
    facts = [f"episode {episode.index}", f"{episode.num_output_tokens} tokens"]
    if versions:
        facts.append(f"version {versions[0]}" + (f"–{versions[-1]}" if len(versions) > 1 else ""))
    if score is not None:
        facts.append(f"reward {score.value:.4g}")
    if episode.failure is not None:
        facts.append(f"failed ({episode.failure}): {episode.message}")
    console.print(Text("    " + plain_line(" · ".join(facts), 200), style="cyan"))
    for turn in episode.turns:
        _text(console, turn.text)


def _prompt(prompt: str | tuple[Message, ...]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.role}: {message.content}" for message in prompt)


def _say(console: Console, line: str) -> None:
    console.print(Text(f"  {plain_line(line, 300)}"))


def _text(console: Console, text: str) -> None:
    console.print(Padding(Text(plain_block(text), overflow="fold"), (0, 0, 0, 6), expand=False))
