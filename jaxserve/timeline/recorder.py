"""Records what the host does: spans of its threads, and HTTP requests from arrival to last byte.

Off by default. Then ``span`` costs one attribute test and hands out an object that does nothing. While on, each span
costs two clock readings and one append. Times are ``time.perf_counter_ns``, the clock of the native journal.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from jaxserve.core.errors import ConfigError

Args = dict[str, Any]


@dataclass(frozen=True)
class HostSpan:
    """One thing a host thread did.

    Attributes:
        thread: name of the thread.
        start_ns, end_ns: begin and end.
        args: what is known about it, e.g. ``step``.
    """

    name: str
    thread: str
    start_ns: int
    end_ns: int
    args: Args


@dataclass
class HttpSpan:
    """One HTTP request; ``end_ns`` is None while it is open.

    Attributes:
        first_token_ns: when its first output was there to be sent, for requests that generate.
    """

    name: str
    start_ns: int
    args: Args
    end_ns: int | None = None
    first_token_ns: int | None = None


@dataclass(frozen=True)
class HostRecords:
    """What a recorder holds.

    Attributes:
        num_dropped: older spans and requests that had to make room.
    """

    spans: list[HostSpan] = field(default_factory=list)
    requests: list[HttpSpan] = field(default_factory=list)
    num_dropped: int = 0

    def followed_by(self, later: HostRecords) -> HostRecords:
        """Both recordings as one."""
        dropped = self.num_dropped + later.num_dropped
        return HostRecords(self.spans + later.spans, self.requests + later.requests, dropped)


class Recorder:
    """Keeps the newest spans, and shows them to whoever watches. Any thread may record.

    Attributes:
        on: whether anything is recorded or watched; the one thing looked at while it is not.
        requests: HTTP requests so far, oldest first.
    """

    def __init__(self) -> None:
        self.on = self._recording = False
        self._watchers: tuple[deque[HostSpan], ...] = ()  # replaced as a whole: other threads iterate
        self._lock = threading.Lock()  # guards start and stop; appends need none
        self._spans: deque[HostSpan] = deque()
        self.requests: deque[HttpSpan] = deque()
        self._counter = itertools.count()

    def start(self, capacity: int) -> None:
        """Forgets everything and records from now on, at most ``capacity`` spans and as many requests.

        Raises:
            ConfigError: it is recording already.
        """
        with self._lock:
            if self._recording:
                raise ConfigError("a timeline is being recorded already; stop it first")
            self._spans, self.requests = deque(maxlen=capacity), deque(maxlen=capacity)
            self._counter = itertools.count()
            self.on = self._recording = True

    def stop(self) -> HostRecords:
        """Records nothing more; returns what there is, in order of end (spans) and arrival (requests)."""
        with self._lock:
            self._recording, self.on = False, bool(self._watchers)
            spans, requests = list(self._spans), list(self.requests)
            num_recorded = next(self._counter)
            self._spans, self.requests = deque(), deque()
        return HostRecords(spans, requests, max(0, num_recorded - len(spans) - len(requests)))

    def watch(self, capacity: int) -> deque[HostSpan]:
        """A queue that gets every span from now on, the oldest falling out, until ``unwatch``; beside a recording."""
        spans: deque[HostSpan] = deque(maxlen=capacity)
        with self._lock:
            self._watchers = (*self._watchers, spans)
            self.on = True
        return spans

    def unwatch(self, spans: deque[HostSpan]) -> None:
        """Ends ``watch``. Idempotent."""
        with self._lock:
            self._watchers = tuple(each for each in self._watchers if each is not spans)
            self.on = self._recording or bool(self._watchers)

    def add(self, span: HostSpan) -> None:
        """Keeps a span that has ended."""
        for watcher in self._watchers:
            watcher.append(span)
        if self._recording:
            next(self._counter)
            self._spans.append(span)

    def open_request(self, name: str, args: Args) -> HttpSpan:
        """A request that has just arrived; whoever opened it sets ``end_ns``."""
        request = HttpSpan(name, time.perf_counter_ns(), args)
        if self._recording:
            next(self._counter)
            self.requests.append(request)
        return request


RECORDER = Recorder()
_current_request: contextvars.ContextVar[HttpSpan | None] = contextvars.ContextVar("jaxserve_request", default=None)


class Span:
    """A span being recorded: ``with span("plan") as plan: ...; plan.note(step=3)``."""

    __slots__ = ("_args", "_name", "_start_ns")

    def __init__(self, name: str, args: Args):
        self._name = name
        self._args = args

    def __enter__(self) -> Span:
        self._start_ns = time.perf_counter_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        end_ns = time.perf_counter_ns()
        if kind is not None:
            self._args["error"] = kind.__name__
        RECORDER.add(HostSpan(self._name, threading.current_thread().name, self._start_ns, end_ns, self._args))

    def note(self, **args: Any) -> None:
        """Adds what became known inside the span."""
        self._args.update(args)


class NoSpan(Span):
    """What ``span`` gives while nothing is recorded."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def note(self, **args: Any) -> None:
        """Nothing to add to."""


_NO_SPAN = NoSpan()


def span(name: str, **args: Any) -> Span:
    """A span of the calling thread, as a context manager. Spans of one thread nest."""
    return Span(name, args) if RECORDER.on else _NO_SPAN


class RequestSpan:
    """The span of an HTTP request, as a context manager around its handling; nothing while nothing is recorded."""

    def __init__(self, method: str, path: str, request_id: str):
        self._request: HttpSpan | None = None
        if RECORDER.on:
            self._request = RECORDER.open_request(f"{method} {path}", {"request_id": request_id})

    def __enter__(self) -> RequestSpan:
        if self._request is not None:
            self._token = _current_request.set(self._request)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._request is not None:
            self._request.end_ns = time.perf_counter_ns()
            _current_request.reset(self._token)

    def note(self, **args: Any) -> None:
        """Adds what became known, e.g. the status."""
        if self._request is not None:
            self._request.args.update(args)


def note_first_token() -> None:
    """The first output of the request that the calling task handles has come; later calls count for nothing."""
    request = _current_request.get() if RECORDER.on else None
    if request is not None and request.first_token_ns is None:
        request.first_token_ns = time.perf_counter_ns()
