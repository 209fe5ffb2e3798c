"""Reports running out of GPU memory in a sentence that names the settings to change. It imports without torch."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import OutOfMemory

ENGINE = "lower engine.embedded.memory_share or engine.embedded.max_batch"
TRAINER = (
    "set trainer.checkpointing=full or trainer.optimizer_states=8bit or cpu, lower trainer.micro_batch_tokens or "
    "trainer.logprob_chunk_tokens, or leave the trainer more of the GPU with a smaller engine.embedded.memory_share"
)


@contextmanager
def naming_settings(who: str, settings: str, kind: type[OutOfMemory] = OutOfMemory) -> Iterator[None]:
    """Turn running out of memory into an error of `kind` that names these settings; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).strip().split(". ")
        tried = next((part for part in first if "Tried to allocate" in part), "")
        wanted = f" ({tried[0].lower()}{tried[1:]})" if tried else ""
        raise kind(f"{who} ran out of GPU memory{wanted}: {settings}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this is our error, torch's own, or the driver's, which comes as a plain `RuntimeError`."""
    return (
        isinstance(error, OutOfMemory)
        or any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)
        or (isinstance(error, RuntimeError) and "CUDA error: out of memory" in str(error))
    )
