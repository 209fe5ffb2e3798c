import logging

import pytest
from aiohttp.http_exceptions import BadStatusLine, LineTooLong

from penstock.http_server.request_log import request_logger


@pytest.mark.parametrize("error", [BadStatusLine("GE\0T"), LineTooLong("GET /", "8190")])
def test_what_is_no_request_is_not_logged_and_our_own_faults_are(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    request_logger().error("Error handling request", exc_info=error)
    assert caplog.records == []
    request_logger().error("Error handling request", exc_info=KeyError("step"))
    request_logger().warning("slow")
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
