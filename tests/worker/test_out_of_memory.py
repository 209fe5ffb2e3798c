import pytest
import torch

from penstock.errors import UserError
from penstock.worker.out_of_memory import ENGINE, TRAINER, naming_settings

CUDA_WORDS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB of which "
    "1.00 GiB is free. Of the allocated memory 100.00 GiB is allocated by PyTorch"
)


def test_running_out_is_a_sentence_that_names_the_settings() -> None:
    with pytest.raises(UserError) as raised, naming_settings("engine0", ENGINE):
        raise torch.OutOfMemoryError(CUDA_WORDS)
    assert str(raised.value) == (
        "engine0 ran out of GPU memory (tried to allocate 2.50 GiB): lower engine.embedded.memory_share or engine.embedded.max_batch"
    )


def test_the_drivers_own_error_counts_too() -> None:
    with (
        pytest.raises(
            UserError,
            match=r"the trainer ran out of GPU memory: set trainer\.checkpointing=full or trainer\.optimizer_states=8bit",
        ),
        naming_settings("the trainer", TRAINER),
    ):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronous")


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), naming_settings("engine0", ENGINE):
        raise RuntimeError("shapes do not fit")
