"""Makes foreign text (an exception, a worker's log, a model's answer) safe for a terminal: control characters
are shown instead of obeyed, and the length is bounded."""

from collections.abc import Sequence

MAX_LINE, MAX_BLOCK = 2000, 20_000
_BIDIRECTIONAL = "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)))
"""Characters that change the order in which others are shown."""


def plain_line(text: str, limit: int = MAX_LINE) -> str:
    """Return the text as one line, newlines shown as spaces."""
    shown = _escaped(" ".join(text[: limit * 2].splitlines()), "")
    if len(shown) > limit or len(text) > limit * 2:
        return f"{shown[:limit]} … ({len(text)} characters in all)"
    return shown


def plain_block(text: str, limit: int = MAX_BLOCK) -> str:
    """Return the text with its line breaks. Of a long text the end is kept: a traceback says there what
    happened."""
    kept = text[-limit:]
    cut = f"… (the last {limit} of {len(text)} characters)\n" if len(kept) < len(text) else ""
    return cut + _escaped(kept, "\n\t")


def without_middle(text: str, limit: int) -> str:
    """Cut the middle out of a long text: an answer's end says more than its middle."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]} […] {text[-tail:]}"


def without_middles(texts: Sequence[str], limit: int) -> list[str]:
    """Cut the middle out of the longest texts, so that all of them together have about `limit` characters."""
    share = fair_share([len(text) for text in texts], limit)
    return [without_middle(text, share) for text in texts]


def fair_share(sizes: Sequence[int], room: int) -> int:
    """Return the size to which the largest must be cut, so that all of them fit the room."""
    for done, size in enumerate(sorted(sizes)):
        share = room // (len(sizes) - done)
        if size > share:
            return share
        room -= size
    return max(sizes, default=0)


def encodable(text: str, encoding: str | None) -> str:
    """Replace characters that the stream's encoding lacks by question marks."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _escaped(text: str, allowed: str) -> str:
    return "".join(char if char in allowed or _is_harmless(char) else _escape(char) for char in text)


def _is_harmless(char: str) -> bool:
    code = ord(char)
    is_control = code < 32 or 127 <= code < 160 or char in _BIDIRECTIONAL
    return not is_control and not 0xD800 <= code < 0xE000


def _escape(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
