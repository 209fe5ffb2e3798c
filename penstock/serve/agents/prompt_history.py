"""From a prompt without messages, text or token ids, to whether it goes on after what was sampled before.

    text       "Q: 1+2? A: 3" + " Q: and 4?"
    tokens     [as a turn saw and sampled][ only this is tokenised ]

A prompt that goes on after no turn and yet has what was said before in it is a history that its client rewrote. It
opens a branch, as a rewritten chat does (`conversation`). One that has nothing of it is about something else.
"""

from collections.abc import Sequence

import numpy as np

from penstock.interfaces import Tokenizer
from penstock.types import IntArray, Turn

TELLING = 8
"""Tokens of an answer that are not found in another prompt by chance."""


class PromptHistory:
    """Of one episode. Its `turns` are given with every call: some are never sent to anybody."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[str, str] = {}

    def remember(self, turn: Turn, prompt: str) -> None:
        """The text that this turn answers. Tokens alone do not tell it: special ones have none."""
        self._texts[turn.id] = prompt

    def after_text(self, turns: Sequence[Turn], prompt: str) -> tuple[list[int], bool]:
        """The tokens of a prompt, and whether its history was rewritten. Text that begins with what a turn saw and
        said goes on after its tokens."""
        known = sorted(
            ((self._text_of(turn), turn) for turn in turns), key=lambda pair: -len(pair[1].token_ids)
        )
        for seen, turn in known:
            if turn.text and prompt.startswith(seen + turn.text):
                added = self._tokenizer.encode(prompt[len(seen) + len(turn.text) :])
                return [*turn.token_ids.tolist(), *self._unclosed(turn, added)], False
        for seen, turn in known:
            if prompt == seen:
                return turn.prompt_ids.tolist(), False
        is_rewritten = any(
            prompt.startswith(seen) or (len(turn.output_ids) >= TELLING and turn.text in prompt)
            for seen, turn in known
            if seen and turn.text
        )
        return self._tokenizer.encode_prompt(prompt), is_rewritten

    def is_rewritten(self, turns: Sequence[Turn], token_ids: Sequence[int]) -> bool:
        """Whether these tokens have what was said before in them, and do not go on after it."""
        prompt = np.asarray(token_ids, dtype=np.int32)
        if any(_begins(prompt, turn.token_ids) or np.array_equal(prompt, turn.prompt_ids) for turn in turns):
            return False
        return any(_begins(prompt, turn.prompt_ids) or self._is_quoted(turn, prompt) for turn in turns)

    def _text_of(self, turn: Turn) -> str:
        text = self._texts.get(turn.id)
        return self._tokenizer.decode(turn.prompt_ids.tolist()) if text is None else text

    def _unclosed(self, turn: Turn, added: list[int]) -> list[int]:
        """An answer that ended by itself has written its own end already."""
        last = int(turn.output_ids[-1]) if len(turn.output_ids) else None
        is_closed = last in self._tokenizer.stop_token_ids and added[:1] == [last]
        return added[1:] if is_closed else added

    def _is_quoted(self, turn: Turn, prompt: IntArray) -> bool:
        """Whether the answer is somewhere in the prompt. Its end may not be: clients write their own."""
        said = turn.output_ids
        if len(said) and int(said[-1]) in self._tokenizer.stop_token_ids:
            said = said[:-1]
        return len(said) >= TELLING and _contains(prompt, said)


def _begins(whole: IntArray, part: IntArray) -> bool:
    return bool(len(part)) and len(part) <= len(whole) and np.array_equal(whole[: len(part)], part)


def _contains(whole: IntArray, part: IntArray) -> bool:
    """As bytes, which are searched fast; what is found between two numbers is none."""
    where, what = whole.astype(np.int32).tobytes(), part.astype(np.int32).tobytes()
    at = where.find(what)
    while at >= 0 and at % 4:
        at = where.find(what, at + 1)
    return at >= 0
