"""Bytes as a person says them."""


def file_size(num_bytes: int) -> str:
    """`812 bytes`, `41 kB`, `3.2 MB`, `1.5 GB`: never 0 of something that is there."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.0f} kB"
