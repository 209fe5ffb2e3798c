"""Switches the Hugging Face hub's client to its cache where the hub can't be reached. The client would retry
each look-up for half a minute, even of models in the cache."""

import os
import threading
from collections.abc import Callable

CONNECT_S, ANSWER_S = 1.5, 0.4
VARIABLE = "HF_HUB_OFFLINE"


def check_hub(name: str, say: Callable[[str], None], *, connect_s: float = CONNECT_S) -> None:
    """Use only what is cached, in this process and in those that it starts, if `name` is no file or folder here
    and the hub can't be reached. If HF_HUB_OFFLINE is set, it decides instead."""
    if os.path.exists(name) or os.environ.get(VARIABLE):
        return
    from huggingface_hub import constants

    if constants.is_offline_mode() or _is_reachable(connect_s):
        return
    os.environ[VARIABLE] = "1"
    constants.HF_HUB_OFFLINE = True
    say(
        f"{constants.ENDPOINT} can't be reached: only models and datasets in the cache are found "
        f"({VARIABLE}=0 looks them up all the same)"
    )


def _is_reachable(connect_s: float) -> bool:
    """Connect as the hub's client does, through proxies too. A hub that is slow to answer counts as reachable. A
    thread asks, since resolving a host name has no time limit."""
    from huggingface_hub import constants, get_session

    reached, ended = threading.Event(), threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=(connect_s, ANSWER_S, ANSWER_S, ANSWER_S))
            reached.set()
        except Exception as error:  # the client's library, and so its errors, depend on its version
            if type(error).__name__ == "ReadTimeout":
                reached.set()
        finally:
            ended.set()

    threading.Thread(target=ask, name="penstock-hub", daemon=True).start()
    ended.wait(connect_s + ANSWER_S)
    return reached.is_set()
