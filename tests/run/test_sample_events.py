"""What is known of an episode, and its turns as texts."""

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from penstock.observe.events import TurnText
from penstock.records import Episode, Group, Message, SamplingParams, Score, Task, Turn
from penstock.run.sample_events import sample_event, turn_texts

WORDS = ["<|user|>", "<|model|>", "<|tool|>", "<|end|>", *"0123456789+="]


def decode(token_ids: list[int]) -> str:
    return "".join(WORDS[token] for token in token_ids)


def ids(text: str) -> list[int]:
    found = []
    while text:
        word = next(word for word in WORDS if text.startswith(word))
        found.append(WORDS.index(word))
        text = text.removeprefix(word)
    return found


event_of = partial(sample_event, decode=decode)


def turn(versions: list[int], text: str) -> Turn:
    count = len(versions)
    return Turn(
        prompt_ids=np.array([1, 2, 3], np.int32),
        output_ids=np.arange(count, dtype=np.int32),
        logprobs=np.zeros(count, np.float32),
        versions=np.array(versions, np.int32),
        finish_reason="stop",
        sampling=SamplingParams(max_tokens=9),
        text=text,
    )


def test_a_sample_tells_its_versions_lengths_and_texts() -> None:
    prompt = (Message(role="user", content="12 × 7"),)
    episode = Episode(task_id="t", turns=(turn([4, 4, 5], "83?"), turn([6], "84")))
    group = Group(number=3, task=Task(id="t", prompt=prompt), episodes=(episode,))
    told = event_of(
        group, group.episodes[0], Score(value=1.0, parts={"exact": 1.0}), time=2.0, step=8, drop=None
    )
    assert (told.group, told.episode, told.step, told.drop) == (3, 0, 8, None)
    assert (told.reward, told.parts) == (1.0, {"exact": 1.0})
    assert (told.oldest_version, told.newest_version) == (4, 6)
    assert (told.num_turns, told.num_prompt_tokens, told.num_output_tokens) == (2, 3, 4)
    assert (told.prompt, told.answer, told.finish_reason) == ("user: 12 × 7", "84", "stop")


def test_versions_are_those_of_the_policy_that_is_trained() -> None:
    judge = msgspec.structs.replace(turn([900], "fine"), policy="judge")
    episode = Episode(task_id="t", turns=(turn([4, 5], "84"), judge))
    group = Group(number=3, task=Task(id="t", prompt="p"), episodes=(episode,))
    told = event_of(group, episode, None, time=2.0, step=8, drop=None, age_of=lambda version: 7 - version)
    assert (told.oldest_version, told.newest_version, told.age) == (4, 5, 3)


def test_an_episode_without_a_turn_or_a_score_is_told_too() -> None:
    group = Group(
        number=3,
        task=Task(id="t", prompt="p"),
        episodes=(Episode(task_id="t", turns=(), index=2, failure="timeout"),),
    )
    told = event_of(group, group.episodes[0], None, time=2.0, step=None, drop="refused")
    assert (told.reward, told.oldest_version, told.num_output_tokens, told.drop) == (None, None, 0, "refused")
    assert (told.episode, told.failure) == (2, "timeout")


def test_what_a_sample_keeps_is_bounded() -> None:
    episode = Episode(
        task_id="t", turns=(turn([1], "a" * 9000),), failure="workflow_error", message="m" * 9000
    )
    group = Group(number=3, task=Task(id="t", prompt="p" * 9000), episodes=(), failures=(episode,))
    told = event_of(group, episode, None, time=2.0, step=8, drop=None)
    assert [len(text) for text in (told.prompt, told.answer, told.message)] == [4005, 4005, 4005]
    told = event_of(group, episode, None, time=2.0, step=8, drop=None, traced=True)
    assert [len(text) for text in (told.prompt, told.answer, told.message)] == [9000, 9000, 4005]


def said(number: int, context: str, output: str, parent: int | None = None, **changes) -> Turn:
    sampled = ids(output)
    return msgspec.structs.replace(
        turn([0] * len(sampled), output),
        id=f"g0.0.{number}",
        parent=None if parent is None else f"g0.0.{parent}",
        prompt_ids=np.array(ids(context), np.int32),
        output_ids=np.array(sampled, np.int32),
        **changes,
    )


ASKED = "<|user|>2+3=<|end|><|model|>"
RESULT = "<|end|><|tool|>5<|end|><|model|>"
CALLED = said(0, ASKED, "2+3")
ANSWERED = said(1, f"{ASKED}2+3{RESULT}", "5<|end|>", 0)


def texts_of(*turns: Turn, num_tokens: int = 4000) -> list[tuple[str, str]]:
    return [(one.label, one.text) for one in turn_texts(turns, decode, num_tokens)]


def test_a_turn_shows_what_was_new_to_it_and_what_it_sampled_with_special_tokens() -> None:
    episode = Episode(task_id="t", turns=(CALLED, ANSWERED))
    group = Group(number=3, task=Task(id="t", prompt="2+3="), episodes=(episode,))
    assert event_of(group, episode, None, time=2.0, step=8, drop=None).turns == (
        TurnText(turn=0, role="context", text="<|user|>2+3=<|end|><|model|>"),
        TurnText(turn=0, role="model", text="2+3"),
        TurnText(turn=1, role="context", text="<|end|><|tool|>5<|end|><|model|>", after=0),
        TurnText(turn=1, role="model", text="5<|end|>"),
    )


def test_a_single_turn_is_its_prompt_and_its_answer() -> None:
    assert texts_of(CALLED) == texts_of() == []


def test_a_rewritten_context_is_shown_whole_and_a_fork_names_its_turn() -> None:
    rewritten = said(2, "<|user|>5<|end|>", "7", 1)
    fork = said(3, f"{ASKED}2+3{RESULT}", "6", 0)
    assert texts_of(CALLED, ANSWERED, rewritten, fork)[4::2] == [
        ("turn 3: context from the beginning", "<|user|>5<|end|>"),
        ("turn 4: context after turn 1", RESULT),
    ]


def test_a_turn_whose_parent_is_no_part_of_the_episode_shows_its_whole_context() -> None:
    assert texts_of(ANSWERED, said(2, ASKED, "9"))[0] == ("turn 1: context", f"{ASKED}2+3{RESULT}")


def test_other_agents_and_policies_are_named() -> None:
    judge, solver = said(1, ASKED, "1", policy="judge"), said(2, ASKED, "2", agent="solver")
    assert [label for label, _ in texts_of(CALLED, judge, solver)][1::2] == [
        "turn 1: model",
        "turn 2: judge",
        "turn 3: solver",
    ]


def test_long_texts_lose_their_middles_before_they_are_decoded() -> None:
    decoded = []

    def counting(token_ids: list[int]) -> str:
        decoded.append(len(token_ids))
        return decode(token_ids)

    long = said(1, f"{ASKED}2+3{RESULT}", "1" * 900 + "2" * 99 + "3", 0)
    texts = turn_texts((CALLED, long), counting, 60)
    assert texts[:3] == turn_texts((CALLED, ANSWERED), decode, 60)[:3]
    assert texts[3].text == "1" * 34 + " […] " + "2" * 10 + "3"
    assert sum(decoded) == 60


def test_an_episode_of_very_many_turns_keeps_the_first_and_the_last() -> None:
    turns = [said(number, ASKED, "1") for number in range(100)]
    numbers = [one.turn for one in turn_texts(turns, decode, 4000)]
    assert numbers == [number for number in (*range(48), *range(84, 100)) for _ in range(2)]


def test_texts_of_long_tokens_are_bounded_too() -> None:
    def spaces(token_ids: Sequence[int]) -> str:
        return " " * 100 * len(token_ids)

    texts = turn_texts((CALLED, ANSWERED), spaces, 20)
    assert sum(len(one.text) for one in texts) <= 20 * 4 + 4 * len(" […] ")
