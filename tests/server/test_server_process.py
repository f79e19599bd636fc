"""A server process: taken ports, signals while loading and while serving, restarts."""

from __future__ import annotations

import signal
import socket
import time
import urllib.request

import pytest
from live_server import Process, connect, http_post, read_all

from jaxserve.server.listen import ListenError, base_url, listen

STREAM = http_post("/v1/completions", b'{"prompt":"Hi","max_tokens":2000,"ignore_eos":true,"stream":true}')


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def test_a_taken_port_is_noticed_before_loading() -> None:
    """O-37."""
    with Process() as first:
        port = port_of(first.expect("listening "))
        with Process(port=port, load_s=60) as second:
            assert second.exit_code(10) == 1
            output, problem = second.child.communicate()
            assert "loading" not in output and f"port {port}" in problem and "Traceback" not in problem


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_loading_exits_promptly(number: signal.Signals) -> None:
    """O-37: while compiling."""
    with Process(load_s=60) as server:
        url = server.expect("listening ")
        server.expect("loading")
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            assert response.status == 200
        started = time.monotonic()
        server.child.send_signal(number)
        assert server.exit_code(5) == 128 + number
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_streams_with_an_error_and_frees_the_port(number: signal.Signals) -> None:
    """O-37: with four streams; a restart works. SIGKILL: test_served_for_long.py."""
    with Process(step_s=0.02, drain_s=0.5) as server:
        port = port_of(server.expect("listening "))
        server.expect("loading")
        server.expect("ready ")
        streams = [connect(port) for _ in range(4)]
        for stream in streams:
            stream.sendall(STREAM)
            assert stream.recv(1000)
        server.child.send_signal(number)
        assert server.exit_code(10) == 0
        for stream in streams:
            received = read_all(stream)
            assert b'data: {"error":{"message":"the server is shutting down' in received
            assert b"[DONE]" not in received and received.endswith(b"0\r\n\r\n")
        with Process(port=port) as again:
            again.expect("listening ")
            again.expect("loading")
            again.expect("ready ")


@pytest.mark.parametrize("load_s", [0, 60])
def test_a_signal_stops_a_server_that_nobody_reads_any_more(load_s: float) -> None:
    """O-37, SIGKILL of whoever started it: its pipes are broken when the signal comes."""
    with Process(load_s=load_s) as server:
        server.expect("listening ")
        server.expect("loading")
        if not load_s:
            server.expect("ready ")
        assert server.child.stdout is not None and server.child.stderr is not None
        server.child.stdout.close()
        server.child.stderr.close()
        server.child.send_signal(signal.SIGTERM)
        assert server.child.wait(5) in (0, 128 + signal.SIGTERM)
        server.child.stdout = server.child.stderr = None


def test_requests_that_end_within_the_drain_time_are_answered_in_full() -> None:
    with Process(step_s=0.02) as server:
        port = port_of(server.expect("listening "))
        server.expect("loading")
        server.expect("ready ")
        with connect(port) as connection:
            connection.sendall(http_post("/v1/completions", b'{"prompt":"Hi","max_tokens":50,"ignore_eos":true}'))
            time.sleep(0.3)
            server.child.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(OSError):
                connect(port)
            assert b'"completion_tokens":50' in read_all(connection)
        assert server.exit_code(5) == 0


def test_under_nohup_a_hangup_changes_nothing() -> None:
    with Process(hangup=signal.SIG_IGN) as server:
        port = port_of(server.expect("listening "))
        server.expect("loading")
        server.expect("ready ")
        server.child.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        with connect(port) as connection:
            connection.sendall(http_post("/v1/completions", b'{"prompt":"Hi"}', "Connection: close"))
            assert b'"finish_reason"' in read_all(connection)


def test_an_engine_that_hangs_does_not_keep_the_process() -> None:
    with Process(step_s=1000, drain_s=0.5) as server:
        port = port_of(server.expect("listening "))
        server.expect("loading")
        server.expect("ready ")
        with connect(port) as connection:
            connection.sendall(STREAM)
            time.sleep(0.2)
            server.child.send_signal(signal.SIGTERM)
            assert server.exit_code(5) == 0


def test_a_second_signal_exits_at_once() -> None:
    with Process(step_s=0.02, drain_s=60) as server:
        port = port_of(server.expect("listening "))
        server.expect("loading")
        server.expect("ready ")
        with connect(port) as connection:
            connection.sendall(STREAM)
            assert connection.recv(1000)
            server.child.send_signal(signal.SIGINT)
            time.sleep(0.3)
            server.child.send_signal(signal.SIGINT)
            assert server.exit_code(2) == 130


def test_a_host_that_is_not_ours_says_so() -> None:
    with pytest.raises(ListenError, match="--host"):
        listen("203.0.113.7", 0)
    with pytest.raises(ListenError, match="--host"):
        listen("no such host", 0)


def test_the_url_of_a_wildcard_address_is_localhost() -> None:
    with listen("0.0.0.0", 0) as listener:
        assert base_url(listener) == f"http://localhost:{listener.getsockname()[1]}"
    if socket.has_ipv6:
        try:
            listener = listen("::1", 0)
        except ListenError:
            return
        with listener:
            assert base_url(listener).startswith("http://[::1]:")
