"""Notices of clouds, from servers that answer as theirs do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from zorselike.elastic.meeting.notice_url import NoticeUrl, is_notice
from zorselike.errors import ConfigError

Answer = tuple[int, str]


@contextmanager
def serving(get: Callable[[dict[str, str]], Answer], put: Answer = (405, "")) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(get({name.lower(): value for name, value in self.headers.items()}))

        def do_PUT(self) -> None:
            self._answer(put)

        def _answer(self, answer: Answer) -> None:
            self.send_response(answer[0])
            self.end_headers()
            self.wfile.write(answer[1].encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/page"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_member_is_told_once_the_page_says_so() -> None:
    answers = [(404, "no"), (503, "busy"), (200, "FALSE"), (200, '{"Events": []}'), (200, "TRUE")]
    asked: list[dict[str, str]] = []

    def get(headers: dict[str, str]) -> Answer:
        asked.append(headers)
        return answers[len(asked) - 1]

    told = threading.Event()
    with serving(get) as url:
        NoticeUrl(url, told.set, every_s=0.001)
        assert told.wait(60)
    assert len(asked) == len(answers)
    assert asked[0]["metadata-flavor"] == "Google" and asked[0]["metadata"] == "true"


def test_a_server_that_wants_a_token_gets_it() -> None:
    def get(headers: dict[str, str]) -> Answer:
        known = headers.get("x-aws-ec2-metadata-token") == "abc"
        return (200, '{"action": "terminate"}') if known else (401, "")

    told = threading.Event()
    with serving(get, put=(200, "abc")) as url:
        NoticeUrl(url, told.set, every_s=0.001)
        assert told.wait(60)


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (None, False),
        ("", False),
        (" none\n", False),
        ("false", False),
        ('{"DocumentIncarnation": 1, "Events": []}', False),
        ('{"Events": [{"EventType": "Preempt"}]}', True),
        ('{"action": "stop", "time": "2026-01-01T00:00:00Z"}', True),
        ("TERMINATE_ON_HOST_MAINTENANCE", True),
        ("2026-01-01T00:00:00Z", True),
    ],
)
def test_answers_of_clouds(page: str | None, says: bool) -> None:
    assert is_notice(page) is says


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="ZORSELIKE_NOTICE_URL is 'file:///etc/passwd'"):
        NoticeUrl("file:///etc/passwd", lambda: None)
