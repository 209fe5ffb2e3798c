"""Describes single groups from a run's journal, as lines for `penstock doctor --group` and `--task`."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.samples import run_folder
from penstock.config.loader import build, read_yaml
from penstock.config.root import PenstockConfig
from penstock.durability.durable_log import FOLDER, read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from penstock.durability.journal.replay import replay
from penstock.errors import UserError
from penstock.loop.attempt_records import (
    AttemptRecord,
    EpisodeEnded,
    GroupAdmitted,
    GroupDropped,
    GroupGenerated,
    GroupResumed,
    GroupScored,
    GroupsSelected,
    GroupsTrained,
    RunResumed,
    from_bytes,
    groups_of,
)
from penstock.observe.plain_text import plain_block, plain_line
from penstock.records import Episode, Message, PartialGroup, Score, WorkProgressed

if TYPE_CHECKING:
    from penstock.models.tokenizer import ChatTokenizer

Decode = Callable[[list[int]], str]


def group_lines(run: str, number: int, decode: Decode | None = None) -> Iterator[str]:
    """Yield the whole life of a group with its text. `decode` turns tokens into text; without it, the tokenizer
    of the run's model is loaded when needed."""
    journal = _journal_of(run)
    records = _records_of(journal, number)
    yield f"group {number}"
    is_scored = any(isinstance(record, GroupScored) for record in records)
    for record in records:
        if not (is_scored and isinstance(record, EpisodeEnded)):  # the record of the scored group has them
            yield from _lines_of(record)
    if not is_scored and not isinstance(records[-1], GroupDropped):
        yield from _under_way(number, records, decode or _decoder_of(journal.parent))


def task_lines(run: str, task_id: str) -> Iterator[str]:
    """Yield the attempts at a task that the journal still has, and what became of each."""
    attempts = read_attempts(DiskFiles(_journal_of(run)), keeps_content=False)
    found = [one for one in attempts.by_number.values() if one.task_id == task_id]
    if not found:
        raise UserError(
            f"the journal has no attempt at task {task_id!r}: none was admitted, or checkpoints have covered them"
        )
    for one in found:
        more = f" in step {one.step}" if one.step is not None else f": {one.reason}" if one.reason else ""
        yield plain_line(f"group {one.ticket.number}: {one.state}{more}")


def _journal_of(run: str) -> Path:
    journal = run_folder(run) / FOLDER
    if not journal.is_dir():
        raise UserError(
            f"{journal.parent} has no journal: a run keeps one when it has checkpoints (run.checkpoint_every), "
            "unless run.journal=false"
        )
    return journal


def _records_of(journal: Path, number: int) -> list[AttemptRecord]:
    """Return the journal's records of one group, oldest first, including rollbacks that undid its training."""
    found: list[AttemptRecord] = []
    trained: int | None = None

    def look(data: bytes, segment: int) -> None:
        nonlocal trained
        record = from_bytes(data)
        if number in groups_of(record):
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


def _lines_of(record: AttemptRecord) -> Iterator[str]:
    match record:
        case GroupAdmitted():
            yield f"  admitted: task {plain_line(record.task_id)}, at most {record.ticket.bound} updates old"
            yield from _text(_prompt(record.prompt))
        case GroupResumed():
            yield "  resumes after a restart"
        case EpisodeEnded():
            yield from _episode(record.episode, None)
        case GroupGenerated():
            yield "  generated: all of its episodes are over"
        case GroupScored():
            yield from _scored(record)
        case GroupsSelected():
            yield f"  taken for a step by the weights of step {record.step}"
        case GroupsTrained():
            yield f"  trained in step {record.step}"
        case GroupDropped():
            again = "" if record.returns is None else "; its task goes back"
            yield f"  dropped: {plain_line(record.reason)}{again}"
        case RunResumed():
            yield f"  waits again: the run went back to step {record.step}"


def _under_way(number: int, records: list[AttemptRecord], decode: Decode) -> Iterator[str]:
    """Yield the episodes that have not ended: how many tokens the journal holds, and the text of each turn."""
    partial = PartialGroup()
    for record in records:
        if isinstance(record, WorkProgressed):
            partial.add(number, record)
        elif isinstance(record, EpisodeEnded):
            partial.end_episode(record.episode)
    for episode in sorted({one for one, _ in partial.turns} - partial.episodes.keys()):
        turns = {turn: parts for (one, turn), parts in sorted(partial.turns.items()) if one == episode}
        tokens = [
            [int(token) for part in parts for token in part.chunk.token_ids] for parts in turns.values()
        ]
        count = sum(map(len, tokens))
        yield f"  episode {episode} is under way: {count} tokens kept, in turn {max(turns) + 1}"
        for turn in tokens:
            yield from _text(decode(turn))


def _decoder_of(run: Path) -> Decode:
    """Return a function that decodes with the tokenizer of the run's model, loaded at first use. If it cannot be
    loaded, a note replaces the text."""

    @functools.cache
    def tokenizer() -> "ChatTokenizer | None":
        from penstock.api import cache_folder
        from penstock.run.preflight import open_model

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


def _scored(record: GroupScored) -> Iterator[str]:
    group = record.scored.group
    failed = f", {len(group.failures)} failed" if group.failures else ""
    yield f"  scored: {len(group.episodes)} episodes{failed}"
    for episode, score, in_loss in zip(group.episodes, record.scored.scores, record.in_loss, strict=True):
        yield from _episode(episode, score, in_loss=in_loss)
    for episode in group.failures:
        yield from _episode(episode, None)


def _episode(episode: Episode, score: Score | None, *, in_loss: bool = True) -> Iterator[str]:
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
    yield "    " + plain_line(" · ".join(facts), 200)
    for turn in episode.turns:
        yield from _text(turn.text)


def _prompt(prompt: str | tuple[Message, ...]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.role}: {message.content}" for message in prompt)


def _text(text: str) -> Iterator[str]:
    for line in plain_block(text).splitlines():
        yield f"      {line}"
