"""From start to exit of a server process.

    listen → answer /health → load in a thread → ready → signal → drain → end what is left → exit

The main thread runs the event loop, so signals and health checks are answered while the model loads and compiles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import uvicorn

from jaxserve.server.app import create_app
from jaxserve.server.engine_protocol import EngineLike
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.listen import base_url, listen
from jaxserve.server.log_format import ACCESS_LOG, formatter
from jaxserve.server.settings import ServerSettings

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FLUSH_S = 1.0  # for the last frames of ended streams to leave
ENGINE_STOP_S = 2.0
EXIT_SLACK_S = 4.0  # this long after the drain timeout the process ends whatever still hangs

T = TypeVar("T")


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # ServerProcess handles signals


class ServerProcess:
    """Runs one server; ``run`` returns the exit code.

    Args:
        at_end: called when the last request is over, however it came to that.

    Attributes:
        url: base URL, known as soon as the object exists: the constructor already listens.

    Raises:
        ListenError: from the constructor.
    """

    def __init__(
        self,
        load: Callable[[], EngineLike],
        settings: ServerSettings,
        on_ready: Callable[[EngineLike, str], None] | None = None,
        at_end: Callable[[], None] = lambda: None,
    ):
        self._listener = listen(settings.host, settings.port)
        self.url = base_url(self._listener)
        self._load = load
        self._settings = settings
        self._on_ready = on_ready
        self._at_end = at_end
        self._watchdog: threading.Timer | None = None
        self._lifecycle = Lifecycle()
        self._loading = False
        self._signal: int | None = None
        self._stop: Callable[[], object] = lambda: None

    def run(self) -> int:
        """Serves until a signal. Errors of loading come out as they were raised.

        A stop signal gives 0 once requests could be served, 128 + signal before that.
        """
        try:
            code = asyncio.run(self._main())
        except BaseException:
            self._exit_if_loading(1)
            raise
        finally:
            self._end()
        self._exit_if_loading(code)
        return code

    def _end(self) -> None:
        """``at_end``, which may take longer than stopping may: requests are over."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._at_end()
        if self._watchdog is not None:
            self._watch(EXIT_SLACK_S)

    def _watch(self, seconds: float) -> None:
        """Ends the process if it is still there then."""
        self._watchdog = threading.Timer(seconds, os._exit, (1,))
        self._watchdog.daemon = True
        self._watchdog.start()

    def stop(self) -> None:
        """Stops as a signal does; from any thread."""
        self._stop()

    def _exit_if_loading(self, code: int) -> None:
        # A thread within XLA's compiler can neither be stopped nor outlive the interpreter's teardown.
        if self._loading:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    async def _main(self) -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        self._handle_signals(stop)
        settings = self._settings
        _log_to_stderr(settings)
        config = uvicorn.Config(
            create_app(self._lifecycle, settings),
            lifespan="off",
            ws="none",
            log_config=None,  # uvicorn's would close the log handlers of everybody else in the process
            access_log=False,  # the app logs requests, with their ids
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s + FLUSH_S),
        )
        server = _Uvicorn(config)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        stopping = asyncio.create_task(stop.wait())
        engine: EngineLike | None = None
        try:
            engine = await self._first(self._load_in_thread(), stopping)
            if engine is not None and await self._first(asyncio.create_task(_start(engine)), stopping):
                self._lifecycle.serve_with(engine)
                if self._on_ready is not None:
                    self._on_ready(engine, self.url)
                fatal = asyncio.wrap_future(engine.fatal)
                either: set[asyncio.Future[Any]] = {stopping, serving, fatal}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if fatal.done():
                    self._watch(EXIT_SLACK_S + settings.drain_timeout_s)  # a step that hangs must not keep us here
                    fatal.result()  # raises
                await self._drain(server)
                return 0
            return 128 + (self._signal or 0)
        except Exception as error:
            self._lifecycle.fail(str(error))
            raise
        finally:
            server.should_exit = True
            await asyncio.wait({serving}, timeout=settings.drain_timeout_s + EXIT_SLACK_S)
            stopping.cancel()
            if engine is not None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(engine.stop(drain_s=0.0), ENGINE_STOP_S)

    async def _first(self, work: asyncio.Future[T], stopping: asyncio.Future[Any]) -> T | None:
        """The result of ``work``, or None when the stop signal comes first."""
        both: set[asyncio.Future[Any]] = {work, stopping}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        work.cancel()
        return None

    def _load_in_thread(self) -> asyncio.Future[EngineLike | None]:
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[EngineLike | None] = loop.create_future()

        def settle(engine: EngineLike | None, error: BaseException | None) -> None:
            self._loading = False
            if loaded.cancelled():
                return
            if engine is not None:
                loaded.set_result(engine)
            else:
                assert error is not None
                # a SystemExit of the loader must not unwind the event loop
                loaded.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        def load() -> None:
            try:
                settled: tuple[EngineLike | None, BaseException | None] = (self._load(), None)
            except BaseException as error:
                settled = (None, error)
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(settle, *settled)

        self._loading = True
        threading.Thread(target=load, name="jaxserve-load", daemon=True).start()
        return loaded

    async def _drain(self, server: uvicorn.Server) -> None:
        self._lifecycle.begin_drain()
        server.should_exit = True  # closes the listener; open answers go on
        deadline = time.monotonic() + self._settings.drain_timeout_s
        while self._lifecycle.active and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._lifecycle.end_active()

    def _handle_signals(self, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if self._signal is not None:  # the second one means now
                os._exit(128 + number)
            self._signal = number
            self._watch(self._settings.drain_timeout_s + EXIT_SLACK_S)
            stop.set()
            name = signal.Signals(number).name
            with contextlib.suppress(OSError):  # whoever read our messages may be gone: often the reason for the signal
                print(f"{name}: stopping; send it again to stop at once", file=sys.stderr, flush=True)

        for number in STOP_SIGNALS:
            # under nohup SIGHUP is ignored on purpose
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            with contextlib.suppress(RuntimeError, ValueError):  # not the main thread: whoever runs us has the signals
                loop.add_signal_handler(number, on_signal, number)


def _log_to_stderr(settings: ServerSettings) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(settings.log_format))
    for name in ("jaxserve", "uvicorn"):
        logger = logging.getLogger(name)
        if not logger.handlers:  # an application that embeds us may have its own
            logger.addHandler(handler)
            logger.propagate = False
        logger.setLevel(logging.WARNING)
    logging.getLogger(ACCESS_LOG).setLevel(logging.INFO if settings.access_log else logging.WARNING)


async def _start(engine: EngineLike) -> bool:
    await engine.start()
    return True
