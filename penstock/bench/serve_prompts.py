"""Defines the prompts of `penstock bench serve`, the same for the engine and for clients, which import no torch."""

PROMPT_TOKENS = 24
DIGITS = 10
"""Ids 1..10 are digits of the shapes' tokenizer."""


def prompt(index: int) -> list[int]:
    return [1 + (index + place) % DIGITS for place in range(PROMPT_TOKENS)]


def prompt_text(index: int) -> str:
    """Return the same prompt as text; its tokens are its digits."""
    return "".join(str(token - 1) for token in prompt(index))
