"""Formats seconds as a person says them."""


def duration(seconds: float) -> str:
    """Format seconds in at most two units: `29 s`, `4 min 10 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _in_two(whole, (60, "min"), (1, "s"))
    if whole < 86_400:
        return _in_two(whole, (3600, "h"), (60, "min"))
    return _in_two(whole, (86_400, "d"), (3600, "h"))


def _in_two(seconds: int, large: tuple[int, str], small: tuple[int, str]) -> str:
    count, rest = divmod(seconds, large[0])
    more = rest // small[0]
    return f"{count} {large[1]} {more} {small[1]}" if more else f"{count} {large[1]}"
