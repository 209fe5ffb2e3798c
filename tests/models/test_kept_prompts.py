"""Prompts that are encoded once."""

from penstock.models.kept_prompts import KeptPrompts


def test_a_prompt_is_encoded_once_and_the_oldest_are_forgotten() -> None:
    asked = []

    def encode(prompt: str) -> list[int]:
        asked.append(prompt)
        return [ord(letter) for letter in prompt]

    kept = KeptPrompts(encode, max_tokens=5)
    first = kept.token_ids("ab")
    first.append(0)  # the caller's own
    assert kept.token_ids("ab") == [97, 98]
    assert kept.token_ids("cd") == [99, 100]
    assert asked == ["ab", "cd"]
    kept.token_ids("ef")  # six tokens: "ab" goes
    kept.token_ids("cd")
    assert asked == ["ab", "cd", "ef"]
    kept.token_ids("ab")
    assert asked == ["ab", "cd", "ef", "ab"]


def test_one_that_is_too_long_is_kept_until_the_next() -> None:
    asked = []
    kept = KeptPrompts(lambda prompt: asked.append(prompt) or [0] * prompt, max_tokens=5)
    assert kept.token_ids(9) == kept.token_ids(9) == [0] * 9
    kept.token_ids(1)
    kept.token_ids(9)
    assert asked == [9, 1, 9]
