"""Which models are worth compiling: what `compile: auto` means for a trainer, for engines and for a server."""

COMPILED_FROM = 100_000_000
"""Parameters from which `torch.compile` is worth its start: the layers of smaller models are quick without it."""


def is_worth_compiling(device: str, num_parameters: int) -> bool:
    """`num_parameters` matters only on a GPU: a CPU gains nothing from it."""
    return device != "cpu" and num_parameters >= COMPILED_FROM
