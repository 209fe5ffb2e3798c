"""Tokens become text as they come, in pieces of whole characters, without decoding the whole answer each time."""

from penstock.records.interfaces import Tokenizer

HALF = "\ufffd"
"""What a tokenizer writes for bytes that are no character yet."""


class TextStream:
    """The text of one answer. All pieces together are what `decode` gives for all tokens.

    A tokenizer may write a token differently at the beginning of a text, so new tokens are decoded together with
    those of the last piece, and only what they add is given out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._from = 0
        """Where the tokens begin that are decoded with new ones."""
        self._shown = 0
        """Tokens whose text was given out."""

    def push(self, token_ids: list[int], *, is_last: bool = False) -> str:
        """The text that these tokens complete. What is no character yet waits, unless these are the last."""
        self._tokens += token_ids
        before = self._tokenizer.decode(self._tokens[self._from : self._shown])
        now = self._tokenizer.decode(self._tokens[self._from :])
        if not is_last and (now.endswith(HALF) or len(now) <= len(before)):
            return ""
        self._from, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]
