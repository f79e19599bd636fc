"""What the playground's page and feed are over HTTP; the page itself is tested in tests/browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from api_client import Api, assert_error
from live_server import connect, eventually, live
from scripted_engine import ScriptedEngine

import jaxserve.server.playground as playground
from jaxserve.barrier import journal
from jaxserve.timeline.recorder import RECORDER

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
STATIC = Path(playground.__file__).parent / "static"


def test_browsers_get_the_page_and_others_what_they_got() -> None:
    api = Api(ScriptedEngine())
    page = api.get("/", headers=BROWSER)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    for headers in ({}, {"accept": "application/json"}):
        assert_error(api.get("/", headers=headers), 404, code="not_found")
    assert api.call("HEAD", "/", headers=BROWSER).status_code == 200
    assert "/playground/{" not in api.get("/openapi.json").text and '"/"' not in api.get("/openapi.json").text


def test_every_file_is_served_and_nothing_comes_from_elsewhere() -> None:
    api = Api(ScriptedEngine())
    page = api.get("/", headers=BROWSER)
    named = set(re.findall(r'(?:src|href)="(/playground/[^"]+)"', page.text))
    base = next(iter(named)).rpartition("/")[0]
    named |= {f"{base}/{path.name}" for path in STATIC.iterdir() if path.name != "index.html"}
    assert len(named) >= 6
    for path in named:
        response = api.get(path)
        assert response.status_code == 200, path
        assert "immutable" in response.headers["cache-control"]
        assert response.headers["content-security-policy"] == page.headers["content-security-policy"]
        assert api.get(path, headers={"if-none-match": response.headers["etag"]}).status_code == 304
    for path in STATIC.iterdir():
        urls = re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]+", path.read_text("utf-8"))
        assert set(urls) <= {"http://www.w3.org"}, path  # the name of SVG, not an address
        assert "innerHTML" not in path.read_text("utf-8")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "require-trusted-types-for" in policy
    assert page.headers["cache-control"] == "no-cache" and page.headers["x-content-type-options"] == "nosniff"


def test_files_of_another_version_are_not_kept_and_others_do_not_exist() -> None:
    api = Api(ScriptedEngine())
    assert api.get("/playground/0/app.js").headers["cache-control"] == "no-cache"
    for path in ("/playground/0/page.py", "/playground/0/..%2Fpage.py", "/playground/0/index.html", "/playground/"):
        assert_error(api.get(path), 404)


def test_the_page_needs_no_key_and_the_feed_does() -> None:
    api = Api(ScriptedEngine(), api_keys=("secret",))
    page = api.get("/", headers=BROWSER)
    assert page.status_code == 200
    assert api.get(re.findall(r'src="(/playground/[^"]+js)"', page.text)[0]).status_code == 200
    assert_error(api.get("/timeline/live"), 401)
    assert_error(api.get("/playground"), 401)


def test_a_loading_server_has_the_page_and_no_feed() -> None:
    api = Api(None)
    assert api.get("/", headers=BROWSER).status_code == 200
    assert_error(api.get("/timeline/live"), 503, code="loading")


@pytest.mark.parametrize("watchers", [1, 3])
def test_recording_is_on_while_somebody_reads_the_feed(watchers: int) -> None:
    assert not RECORDER.on and not journal.is_on()
    with live(ScriptedEngine()) as port:
        open_feeds = [connect(port) for _ in range(watchers)]
        for feed in open_feeds:
            feed.sendall(b"GET /timeline/live HTTP/1.1\r\nHost: server\r\n\r\n")
            received = b""
            while b"data: " not in received or not received.endswith(b"\r\n"):
                received += feed.recv(65536)
            assert b"text/event-stream" in received
            event = json.loads(re.findall(rb"data: (.*)\n\n", received)[0])
            assert event["steps"] == [] and event["now_ms"] >= 0
        assert RECORDER.on and journal.is_on()
        for feed in open_feeds[1:]:
            feed.close()
        if watchers > 1:
            assert not eventually(lambda: not RECORDER.on, 0.3)
        open_feeds[0].close()
        assert eventually(lambda: not RECORDER.on and not journal.is_on())


def test_the_number_of_watchers_is_limited() -> None:
    with live(ScriptedEngine()) as port:
        feeds = []
        for _ in range(5):
            feeds.append(connect(port))
            feeds[-1].sendall(b"GET /timeline/live HTTP/1.1\r\nHost: server\r\n\r\n")
            head = feeds[-1].recv(65536)
        while not head.endswith(b"}"):
            head += feeds[-1].recv(65536)
        assert head.startswith(b"HTTP/1.1 429") and b"close one" in head
        for feed in feeds:
            feed.close()
        assert eventually(lambda: not RECORDER.on)
