"""Ends look-ups on the Hugging Face hub early where it can't be reached. Its client would retry each of them for
half a minute, also those of models that are in its cache."""

import os
import threading
from collections.abc import Callable

PROBE_S = 1.5
VARIABLE = "HF_HUB_OFFLINE"


def check_hub(name: str, say: Callable[[str], None], *, timeout_s: float = PROBE_S) -> None:
    """Switch to what is cached, in this process and in those that it starts, if `name` is no file or folder here
    and the hub does not answer. The variable HF_HUB_OFFLINE decides if it is set."""
    if os.path.exists(name) or os.environ.get(VARIABLE):
        return
    from huggingface_hub import constants

    if constants.is_offline_mode() or _answers(timeout_s):
        return
    os.environ[VARIABLE] = "1"
    constants.HF_HUB_OFFLINE = True
    say(
        f"{constants.ENDPOINT} can't be reached: only models and datasets in the cache are found "
        f"({VARIABLE}=0 looks them up all the same)"
    )


def _answers(timeout_s: float) -> bool:
    """Ask in a thread, since resolving a host name has no time limit."""
    from huggingface_hub import constants, get_session

    answered = threading.Event()
    ended = threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=timeout_s)
            answered.set()
        except Exception:  # the client's own kinds depend on its version; all mean that there was no answer
            pass
        finally:
            ended.set()

    threading.Thread(target=ask, name="penstock-hub", daemon=True).start()
    ended.wait(timeout_s)
    return answered.is_set()
