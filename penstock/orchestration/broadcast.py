"""An update in which trainer and engines act together: both succeed, or neither waits for the other."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from penstock.errors import UpdateAbandoned
from penstock.types import UpdateReceipt

LAST_WORDS_S = 1.0
"""How long a failed sender waits for the engines' answers: one that died says more than a closed connection."""


async def send_and_take(
    send: Coroutine[Any, Any, None], take: Coroutine[Any, Any, UpdateReceipt]
) -> UpdateReceipt:
    """When one side fails, the other is cancelled, which tells it. What leaves is the error of whoever failed, not
    that of those who were told."""
    sending, taking = asyncio.ensure_future(send), asyncio.ensure_future(take)
    both = (taking, sending)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if not taking.done():
            await asyncio.wait([taking], timeout=LAST_WORDS_S)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
    errors = [error for task in both if not task.cancelled() and (error := task.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, UpdateAbandoned)):
        raise error
    return taking.result()
