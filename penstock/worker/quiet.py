"""Keeps start-up messages of libraries out of worker logs, where only errors should catch the eye."""

import logging


def quieten() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch").setLevel(logging.ERROR)
