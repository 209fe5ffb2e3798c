"""What our HTTP servers write into logs. aiohttp writes a traceback for everything that is no request: whoever
reaches the port could fill the disk with them. Faults of our own are written as ever."""

import logging

NO_REQUEST = "HttpProcessingError"
"""How aiohttp calls what it could not read."""


def request_logger() -> logging.Logger:
    """For `web.AppRunner(logger=…)`."""
    logger = logging.getLogger("penstock.requests")
    if not logger.filters:
        logger.addFilter(is_own_fault)
    return logger


def is_own_fault(record: logging.LogRecord) -> bool:
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or all(base.__name__ != NO_REQUEST for base in kind.__mro__)
