"""`penstock inspect`: what became of the groups of a run, from its ledger and its journal."""

import functools
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
    GroupsSelected,
    GroupsTrained,
    LifeRecord,
    RunResumed,
    WorkProgressed,
    from_bytes,
)
from penstock.cli.samples import run_folder
from penstock.config.loader import build, read_yaml
from penstock.errors import UserError
from penstock.observe.plain_text import plain_block, plain_line
from penstock.orchestration.config import PenstockConfig
from penstock.types import Episode, Message, PartialGroup, Score

if TYPE_CHECKING:
    from penstock.models.tokenizer import ChatTokenizer

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


Decode = Callable[[list[int]], str]


def print_run(
    run: str, *, group: int | None, console: Console | None = None, decode: Decode | None = None
) -> None:
    """`decode` gives the text of tokens; without it the tokenizer of the run's model is loaded when need be."""
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
        _print_life(console, group, life_of(journal, group), decode or _decoder_of(journal.parent))


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
        case GroupsTrained() | GroupsSelected():
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


def _print_life(console: Console, number: int, records: list[LifeRecord], decode: Decode) -> None:
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
            case GroupsSelected():
                _say(console, f"taken for a step by the weights of step {record.step}")
            case GroupsTrained():
                _say(console, f"trained in step {record.step}")
            case GroupDropped():
                again = "" if record.returns is None else "; its task goes back"
                _say(console, f"dropped: {record.reason}{again}")
            case RunResumed():
                _say(console, f"waits again: the run went back to step {record.step}")
    if not is_over:
        for line, turns in _under_way(number, records):
            _say(console, line)
            for tokens in turns:
                _text(console, decode(tokens))


def _under_way(number: int, records: list[LifeRecord]) -> Iterator[tuple[str, list[list[int]]]]:
    """Episodes that have not ended: how many tokens are safe in the journal, and those of each turn."""
    ended = {one.episode.index for one in records if isinstance(one, EpisodeEnded)}
    partial = PartialGroup()
    for record in records:
        if isinstance(record, WorkProgressed):
            for part in record.turns:
                if part.group == number and part.episode not in ended:
                    partial.add_part(part)
    for episode in sorted({place[0] for place in partial.turns}):
        turns = {turn: parts for (one, turn), parts in sorted(partial.turns.items()) if one == episode}
        tokens = [
            [int(token) for part in parts for token in part.chunk.token_ids] for parts in turns.values()
        ]
        count = sum(map(len, tokens))
        yield f"episode {episode} is under way: {count} tokens kept, in turn {max(turns) + 1}", tokens


def _decoder_of(run: Path) -> Decode:
    """With the tokenizer of the run's model, loaded at the first use. Without it there is no text, and no error."""

    @functools.cache
    def tokenizer() -> "ChatTokenizer | None":
        from penstock.api import cache_folder
        from penstock.orchestration.preflight import open_model

        try:
            model = {"model": read_yaml(run / "config.yaml")["model"]}
            config = build(PenstockConfig, model)
            return open_model(config, log=lambda line: None, cache=cache_folder())[1]
        except (UserError, OSError, KeyError):
            return None

    def decode(tokens: list[int]) -> str:
        found = tokenizer()
        return "(its tokenizer can't be loaded)" if found is None else found.decode(tokens)

    return decode


def _print_scored(console: Console, record: GroupScored) -> None:
    group = record.scored.group
    failed = f", {len(group.failures)} failed" if group.failures else ""
    _say(console, f"finished and scored: {len(group.episodes)} episodes{failed}")
    for episode, score, in_loss in zip(group.episodes, record.scored.scores, record.in_loss, strict=True):
        _print_episode(console, episode, score, in_loss=in_loss)
    for episode in group.failures:
        _print_episode(console, episode, None)


def _print_episode(console: Console, episode: Episode, score: Score | None, *, in_loss: bool = True) -> None:
    versions = sorted({int(one) for turn in episode.turns for one in turn.versions})
    facts = [f"episode {episode.index}", f"{episode.num_output_tokens} tokens"]
    if versions:
        facts.append(f"version {versions[0]}" + (f"–{versions[-1]}" if len(versions) > 1 else ""))
    if score is not None:
        facts.append(f"reward {score.value:.4g}")
    if not in_loss:
        facts.append("left out of the loss by selection")
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
