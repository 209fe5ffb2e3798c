"""The page's server among clients that send whatever they like: nothing is a fault of the server, and a person who
looks at the page notices nothing."""

import hashlib
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.made_run import write_made_run
from penstock.observe.reading.run_reading import RunReading
from penstock.page.dashboard_app import ALL_RUNS, ONE_RUN, ONE_THING
from tests.hostile_bytes import kept_open, mangled, send_to, statuses
from tests.page.live_page import TOKEN, served

PATHS = [
    "/",
    "/metrics",
    "/api/runs",
    *(f"/api/{name}" for name in ALL_RUNS),
    *(f"/api/run/0/{name}" for name in ONE_RUN),
    *(f"/api/run/0/{name}/1" for name in ONE_THING),
    "/..%2f..%2fetc/passwd",
    "/api/run/99999999999999999999/now",
]
NAMES = (
    "step",
    "group",
    "reward",
    "tokens",
    "age",
    "drop",
    "task",
    "sort",
    "limit",
    "offset",
    "x",
    "names",
    "buckets",
)
NAMES += ("find", "reason", "time")
VALUES = (
    "",
    "-1",
    "1e400",
    "nan..inf",
    "2..",
    "9" * 30,
    "9" * 5000,
    "\x00",
    "\ud800",
    "🦆" * 50,
    "[](){}*+?",
    "new",
)
LONGEST = 8000
MESSAGES = [
    b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Penstock-Token: %s\r\n\r\n" % (path.encode(), TOKEN.encode())
    for path in PATHS
] + [
    b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Penstock-Token: \xff\xfe\r\n\r\n",
    b"GET /api/runs HTTP/1.1\r\nHost: \xff\r\nAuthorization: Bearer \xff\r\n\r\n",
    b"POST /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\nhalf",
]


def fingerprint(folder: Path) -> str:
    """Of every file in it."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_made_run(folder, steps=5, samples_per_step=16)
    return folder


def test_whatever_is_sent_costs_its_own_connection_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even a line of a log, which would grow for ever."""
    before, kept = fingerprint(folder), 80
    with kept_open(served(RunReading(folder))) as (runner, server):

        @settings(max_examples=40, deadline=None, derandomize=True)
        @given(data=mangled(MESSAGES))
        def send(data: bytes) -> None:
            answers = runner.run(send_to(server.port, data))
            assert [status for status in statuses(answers) if status >= 500] == []
            assert runner.run(server.get("run/0/samples"))["kept"] == kept

        send()
    assert fingerprint(folder) == before
    assert [record for record in caplog.records if record.name != "asyncio"] == []


def test_every_question_is_answered_or_refused_in_a_sentence(folder: Path) -> None:
    values = st.sampled_from(VALUES) | st.text(max_size=20)
    with kept_open(served(RunReading(folder))) as (runner, server):

        @settings(max_examples=150, deadline=None, derandomize=True)
        @given(
            path=st.sampled_from(PATHS),
            query=st.dictionaries(st.sampled_from(NAMES), values, max_size=4),
        )
        def ask(path: str, query: dict[str, str]) -> None:
            words = "&".join(f"{name}={escaped(value)}" for name, value in query.items())
            headers = f"Host: 127.0.0.1\r\nX-Penstock-Token: {TOKEN}\r\nConnection: close\r\n"
            asked = f"GET {path}?{words} HTTP/1.1\r\n{headers}\r\n"
            assume(len(asked) < LONGEST)  # a longer line is refused before it is read to its end
            (status,) = statuses(runner.run(send_to(server.port, asked.encode(), patience_s=30.0)))
            assert status in (200, 400, 404), asked

        ask()


def escaped(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")
