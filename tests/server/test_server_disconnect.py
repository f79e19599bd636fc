"""A client that goes away stops its request, whatever the request was doing."""

from __future__ import annotations

import json
import socket
import struct
import urllib.request

import pytest
from live_server import connect, eventually, http_post, live, read_all
from scripted_engine import ScriptedEngine

LONG = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"prompt": ["a", "b", "c"], "n": 2}, {"prompt": ["a", "b"], "stream": True}]
)
def test_closing_the_connection_aborts(fields: dict, reset: bool) -> None:
    engine = ScriptedEngine(step_s=0.01)
    with live(engine) as port:
        for _ in range(3):
            connection = connect(port)
            connection.sendall(http_post("/v1/completions", json.dumps(LONG | fields).encode()))
            assert eventually(lambda: engine.steps > 3)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            assert eventually(lambda: engine.running == {})
            engine.steps = 0
        assert engine.aborted
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            assert b'path="/v1/completions",status=' in response.read()


@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_connection_while_queued_aborts(stream: bool) -> None:
    engine = ScriptedEngine(step_s=60)  # not one token comes
    with live(engine) as port:
        connection = connect(port)
        connection.sendall(http_post("/v1/completions", json.dumps(LONG | {"stream": stream}).encode()))
        assert eventually(lambda: len(engine.running) == 1)
        connection.close()
        assert eventually(lambda: engine.running == {})


def test_a_client_that_leaves_before_reading_the_answer_harms_nobody() -> None:
    engine = ScriptedEngine()
    with live(engine) as port:
        for _ in range(20):
            with connect(port) as connection:
                connection.sendall(http_post("/v1/completions", b'{"prompt": "Hi", "stream": true}'))
        assert eventually(lambda: engine.running == {})
        with connect(port) as connection:
            connection.sendall(http_post("/v1/completions", b'{"prompt": "Hi"}', "Connection: close"))
            assert b'"text":"Hello"' in read_all(connection)


def test_malformed_bodies_over_a_socket_are_json_errors() -> None:
    with live(ScriptedEngine(), max_body_bytes=1000) as port:
        for body, status in (
            (b"\xff", b"400"),
            (b'{"prompt":"x\\ud83d"}', b"400"),
            (b"", b"400"),
            (b"a" * 3000000, b"413"),
        ):
            with connect(port) as connection:
                connection.sendall(http_post("/v1/completions", body, "Connection: close"))
                answer = read_all(connection)
                assert answer.startswith(b"HTTP/1.1 " + status) and b'{"error":{"message":' in answer
