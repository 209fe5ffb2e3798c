"""Decodes tokens as they arrive, in pieces of whole characters, without decoding the whole answer each time."""

from penstock.records.interfaces import Tokenizer

HALF = "\ufffd"
"""What a tokenizer writes for bytes that do not form a whole character yet."""


class TextStream:
    """Holds the text of one answer. All pieces together equal what `decode` returns for all tokens.

    A tokenizer may write a token differently at the beginning of a text. So new tokens are decoded together
    with those of the last piece, and only the text that they add is returned.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._from = 0
        """The index of the first token that is decoded together with new ones."""
        self._shown = 0
        """The number of tokens whose text was returned."""

    def push(self, token_ids: list[int], *, is_last: bool = False) -> str:
        """Return the text that these tokens complete. Bytes that are no whole character yet wait, unless these
        are the last."""
        self._tokens += token_ids
        before = self._tokenizer.decode(self._tokens[self._from : self._shown])
        now = self._tokenizer.decode(self._tokens[self._from :])
        if not is_last and (now.endswith(HALF) or len(now) <= len(before)):
            return ""
        self._from, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]
