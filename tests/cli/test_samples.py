import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from penstock.cli.main import main
from penstock.cli.samples import (
    NAME,
    Choice,
    encode_sample,
    export_samples,
    facts,
    print_samples,
    read_samples,
    run_folder,
    sections,
)
from penstock.errors import UserError
from penstock.observe.events import SampleEvent, TurnText
from tests.observe.examples import SAMPLE, TURNS, run_event
from tests.observe.store import written
from tests.observe.store.written import write


def sample(number: int, reward: float | None, *, step: int | None = 1, **changes) -> SampleEvent:
    return msgspec.structs.replace(SAMPLE, episode=number, reward=reward, step=step, **changes)


def keep(folder: Path, *samples: SampleEvent) -> Path:
    write(folder, [run_event(), *samples])
    return folder


def shown(folder: Path, choice: Choice, *, width: int = 80, full: bool = False) -> str:
    out = io.StringIO()
    print_samples(str(folder), choice, full=full, console=Console(file=out, width=width))
    return out.getvalue()


SIX = (
    sample(0, 0.5),
    sample(1, 1.0),
    sample(2, 0.0),
    sample(3, 1.0, step=2),
    sample(4, 0.25, step=2),
    sample(5, None, step=None, drop="score_error"),
)


def numbers(choice: Choice) -> dict[str, list[int]]:
    return {title: [one.episode for one in some] for title, some in sections(SIX, choice)}


def test_best_and_worst_are_by_reward_and_latest_by_age() -> None:
    assert numbers(Choice(best=3, worst=2, latest=2)) == {
        "best": [3, 1, 0],
        "worst": [2, 4],
        "latest": [5, 4],
    }
    assert numbers(Choice()) == {"best": [3, 1], "worst": [2, 4], "latest": [5, 4]}


def test_among_equal_rewards_every_group_has_its_turn() -> None:
    several = [sample(number, 1.0, group=group) for number, group in enumerate((7, 8, 8, 8))]
    ((_, some),) = sections([*several, sample(9, 0.5, group=9)], Choice(best=3))
    assert [one.episode for one in some] == [3, 0, 2]


def test_a_step_is_shown_whole_or_by_reward() -> None:
    assert numbers(Choice(step=1)) == {"3 of the 3 samples of step 1": [0, 1, 2]}
    assert numbers(Choice(step=2, worst=1)) == {"worst of step 2": [4]}
    with pytest.raises(UserError, match="no sample of step 9 is kept; steps 1 to 2 are there"):
        numbers(Choice(step=9))


def test_facts_say_what_became_of_an_answer() -> None:
    assert facts(SAMPLE) == ["step 2", "reward 1", "exact 1", "8 tokens, stop", "versions 4–5", "task t"]
    assert facts(sample(0, 0.5, advantage=-1.25))[2:4] == ["exact 1", "advantage -1.25"]
    failed = sample(0, None, step=None, drop="failed_episodes", failure="timeout", parts={}, num_turns=3)
    assert facts(failed)[:3] == ["dropped (failed_episodes)", "failed (timeout)", "8 tokens in 3 turns, stop"]
    many = sample(0, 1.0, parts={f"f{i}": 0.5 for i in range(10)})
    assert facts(many)[9:11] == ["f7 0.5", "2 more parts"]


def test_it_is_readable_at_80_columns(tmp_path: Path) -> None:
    parts = {f"function_{i}": 0.125 for i in range(6)}
    text = shown(keep(tmp_path, sample(0, 1.0, parts=parts, answer="word " * 60)), Choice(best=1))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1] == "step 1 · reward 1 · function_0 0.125 · function_1 0.125 · function_2 0.125"
    assert lines[2] == "  function_3 0.125 · function_4 0.125 · function_5 0.125 · 8 tokens, stop"
    assert lines[3] == "  versions 4–5 · task t"
    assert lines[4].rstrip() == "  prompt  12 × 7"


def test_texts_are_escaped_and_bounded(tmp_path: Path) -> None:
    evil = sample(
        0, 1.0, prompt="[red]\x1b[2J\nsecond", answer="a" * 1500 + "the end", task_id="\x1b[2J" * 99
    )
    keep(tmp_path, evil)
    short = shown(tmp_path, Choice(latest=1))
    assert "\x1b" not in short
    assert "prompt  [red]\\x1b[2J second" in short
    assert "[…]" in short
    assert "the end" in short
    assert len(short) < 1500
    full = shown(tmp_path, Choice(latest=1), full=True)
    assert "\x1b" not in full
    assert "    second" in full
    assert full.count("a") > 1500


def test_every_turn_is_printed_with_its_role(tmp_path: Path) -> None:
    keep(tmp_path, sample(0, 1.0, turns=TURNS, num_turns=2))
    lines = [line.rstrip() for line in shown(tmp_path, Choice(latest=1)).splitlines()]
    assert lines[-5:] == [
        "  prompt   12 × 7",
        "  model    <call>mul(12, 7)</call><|end|>",
        "  context  <|tool|>84<|end|><|model|>",
        "  model    84<|end|>",
        "",
    ]
    full = [line.rstrip() for line in shown(tmp_path, Choice(latest=1), full=True).splitlines()]
    assert full[full.index("  turn 1: context") :] == [
        "  turn 1: context",
        "    <|user|>12 × 7<|end|><|model|>",
        "  turn 1: model",
        "    <call>mul(12, 7)</call><|end|>",
        "  turn 2: context",
        "    <|tool|>84<|end|><|model|>",
        "  turn 2: model",
        "    84<|end|>",
        "",
    ]
    assert "  answer" not in full


def test_what_a_reward_says_of_an_answer_is_printed_below_it(tmp_path: Path) -> None:
    keep(tmp_path, sample(0, 1.0, extra={"judge.reason": "84 is\x1b right", "judge.model": "b" * 999}))
    lines = [line.rstrip() for line in shown(tmp_path, Choice(latest=1)).splitlines()]
    assert "  judge.reason  84 is\\x1b right" in lines
    assert "b" * 500 not in "".join(line.strip() for line in lines)
    assert "b" * 999 in shown(tmp_path, Choice(latest=1), full=True).replace(" ", "").replace("\n", "")


def test_of_many_turns_the_first_and_the_last_are_printed_unless_in_full(tmp_path: Path) -> None:
    many = tuple(
        TurnText(turn=turn, role=role, text=f"{role}{turn}")
        for turn in range(10)
        for role in ("context", "model")
    )
    keep(tmp_path, sample(0, 1.0, turns=many, num_turns=10))
    lines = shown(tmp_path, Choice(latest=1)).split()
    assert [word for word in lines if word[-1].isdigit() and word[:5] in ("conte", "model")] == [
        *("model0", "context1", "model1", "context2", "model2", "context3", "model3", "model9")
    ]
    assert "… 11 more (--full)" in shown(tmp_path, Choice(latest=1))
    assert "context9" in shown(tmp_path, Choice(latest=1), full=True)


def test_a_run_is_found_by_folder_or_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keep(tmp_path / "runs" / "demo", *SIX)
    for run in ("demo", "runs/demo"):
        with pytest.raises(SystemExit) as ended:
            main(["samples", run, "--best", "1"])
        assert not ended.value.code
        assert capsys.readouterr().out.startswith("best\nstep 2 · reward 1 · exact 1")


def test_a_folder_that_is_no_run_does_not_hide_the_run_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock export demo` makes a folder `demo` beside `runs`."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/demo", "demo", "other"):
        Path(folder).mkdir(parents=True)
    Path("runs/demo/config.yaml").touch()
    assert run_folder("demo") == Path("runs/demo")
    assert run_folder("other") == Path("other")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("gone", "error: there is no run 'gone': neither gone nor runs/gone is a folder\n"),
        (
            "empty",
            "error: empty has no samples: a run keeps them while it trains, unless observe.samples_mb is 0",
        ),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(
    run: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["samples", run])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_run_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format": 9}')
    with pytest.raises(UserError, match="has format 9, and this Penstock reads format 2"):
        print_samples(str(tmp_path), Choice(), full=False)


def test_all_that_is_kept_can_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = keep(tmp_path / "run", *SIX)
    with pytest.raises(SystemExit) as ended:
        main(["samples", str(folder), "--export"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"wrote 6 samples to {folder}/samples.jsonl\n"
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 6


def test_a_line_has_all_that_is_known_of_a_sample(tmp_path: Path) -> None:
    write(tmp_path, [run_event(), written.sample(7)])
    assert export_samples(tmp_path, tmp_path / NAME) == 1
    (row,) = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert (row["step"], row["drop"], row["task_id"], row["group"]) == (2, None, "t", 7)
    assert (row["prompt"], row["answer"], row["finish_reason"]) == ("12 × 7", "84", "stop")
    assert (row["reward"], row["parts"]) == (1.0, {"exact": 1.0})
    assert (row["oldest_version"], row["newest_version"], row["num_output_tokens"]) == (4, 5, 8)
    assert "×" in (tmp_path / NAME).read_text()  # readable without a decoder
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_a_line_has_every_turn_by_name(tmp_path: Path) -> None:
    write(tmp_path, [run_event(), written.sample(7, turns=TURNS), written.sample(8)])
    export_samples(tmp_path, tmp_path / NAME)
    first, second = (json.loads(line)["turns"] for line in (tmp_path / NAME).read_text().splitlines())
    assert first[1:3] == [
        {"turn": 0, "role": "model", "text": "<call>mul(12, 7)</call><|end|>"},
        {"turn": 1, "role": "context", "text": "<|tool|>84<|end|><|model|>", "after": 0},
    ]
    assert (len(first), second) == (4, [])


def test_a_half_of_a_surrogate_pair_in_a_turn_is_escaped() -> None:
    odd = sample(0, 1.0, turns=(TurnText(turn=0, role="model", text="\ud800"),))
    assert json.loads(encode_sample(odd))["turns"][0]["text"] == "\ud800"


def test_what_is_written_is_read_back_oldest_first(tmp_path: Path) -> None:
    odd = written.sample(9, prompt="half \ud800 of a pair\n\x1b[2J", reward=None, drop="refused", step=None)
    write(tmp_path, [run_event(), written.sample(8), odd])
    first, second = read_samples(tmp_path)
    assert (first.group, first.prompt) == (8, "12 × 7")
    assert (second.group, second.prompt) == (9, "half \\ud800 of a pair\n\x1b[2J")
    assert export_samples(tmp_path, tmp_path / NAME) == 2


def test_a_run_without_events_has_no_samples(tmp_path: Path) -> None:
    assert list(read_samples(tmp_path)) == []
