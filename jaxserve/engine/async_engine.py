"""The engine behind a server: a thread that steps, and asynchronous iterators of deltas."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import CapacityError, EngineDead, InvalidRequest, RaceError
from jaxserve.core.request import OutputDelta, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.speculation_metrics import speculation_in_use
from jaxserve.engine.step_watchdog import StepWatchdog

log = logging.getLogger(__name__)
END = None  # closes an output queue
Items = list[OutputDelta | Exception | None]


class OutputStream:
    """The deltas of one request, in order. Ending it early (``aclose``, or losing it) aborts the request."""

    def __init__(self, engine: AsyncEngine, request: Request):
        self._closed = True  # nothing to abort until the request is the engine's
        self._engine = engine
        self.loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[OutputDelta | Exception | None] = asyncio.Queue()
        self._open_outputs = request.params.n
        self.request_id = request.request_id
        self._closed = False

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if self._closed:
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if item is END:
            self._closed = True
            raise StopAsyncIteration
        if isinstance(item, Exception):
            self._closed = True
            raise item
        return item

    async def aclose(self) -> None:
        """Ends the iteration and aborts what is unfinished."""
        self.close()

    def close(self) -> None:
        """As ``aclose``. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._open_outputs > 0:
                self._engine.abort_stream(self)

    def __del__(self) -> None:
        self.close()

    def put(self, items: Items) -> None:
        """Takes items over, on the event loop."""
        for item in items:
            self._queue.put_nowait(item)
            if isinstance(item, OutputDelta) and item.finish_reason is not None:
                self._open_outputs -= 1
                if self._open_outputs == 0:
                    self._queue.put_nowait(END)


def put_all_from_thread(loop: asyncio.AbstractEventLoop, batch: list[tuple[OutputStream, Items]]) -> bool:
    """Hands the items of several streams over from the step thread. False if the event loop has closed, and with it the
    clients' ends. Waking the loop is a system call, so it is done once a step and not once a stream."""

    def put() -> None:
        for stream, items in batch:
            stream.put(items)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True


class AsyncEngine:
    """An engine stepped by its own thread.

    Requests are checked on the caller's side, so a refusal costs the step loop nothing. Commands (add, abort) reach the
    thread through one queue, emptied before every step. With no work the thread sleeps on that queue: an idle server
    uses no CPU.

    Attributes:
        fatal: done, with the error, when the process should end and not only this engine: the race check's report, or a
            step that does not come back.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}  # by request id, from acceptance to the end; changed under _lock
        self._num_open = 0  # sequences accepted and not ended; guarded by _lock
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._dead: str | None = None
        self.fatal: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._draining = False
        self._watchdog = StepWatchdog(engine.config.watchdog_timeout_s, self._stalled)
        self._thread = threading.Thread(target=self._run, name="jaxserve-step", daemon=True)

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Callable[[str], None] = lambda message: None) -> AsyncEngine:
        """Loads and compiles (blocking). Raises ConfigError or ModelLoadError."""
        return cls(Engine(config, progress))

    # -- what the server reads ---------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """What the model is called."""
        return self._engine.model_name

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, if it has one."""
        return self._engine.chat_template

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""
        return self._engine.context_length

    @property
    def embedding_size(self) -> int:
        """Numbers of the vector that ``SamplingParams.pooling`` makes of a prompt."""
        return self._engine.model_config.hidden_size

    @property
    def config(self) -> EngineConfig:
        """The configuration it was made from."""
        return self._engine.config

    @property
    def metrics(self) -> EngineMetrics:
        """Counters; ``metrics.registry`` renders at ``/metrics``."""
        return self._engine.metrics

    def state(self) -> dict[str, Any]:
        """Figures of the moment. Read without stopping the step loop, so they may be a step apart."""
        scheduler = self._engine.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "pages_free": scheduler.pool.num_free,
            "pages_cached": scheduler.memory.num_cached,
            "pages_evictable": scheduler.memory.num_evictable,
            "pages_total": scheduler.pool.num_usable,
            "ready": self._thread.is_alive() and self._dead is None and not self._draining,
            "dead": self._dead,
            "late_compiles": self._engine.num_late_compiles,
            "platform": self._engine.parts.platform,
            "attention_backend": self._engine.parts.worker.model_runner.backend.name,
            "shared_reads": self._engine.fences_in_use(),
            "speculation": speculation_in_use(self._engine),
            "graph_splits": dict(self.metrics.graph_splits) or "not known",
            "fences": {f"{kind}:{reason}": n for (kind, reason), n in dict(scheduler.barrier.counts).items()},
        }

    def encode_chat(self, messages: list[dict], **options: Any) -> list[int]:
        """Token ids of a conversation, see ``Engine.encode_chat``. Raises InvalidRequest."""
        return self._engine.encode_chat(messages, **options)

    # -- requests ----------------------------------------------------------------------------------------------------

    def check_controls(self, params: SamplingParams) -> None:
        """Compiles the grammar of a request, which may take a second, so that ``generate`` need not. Any thread.

        Raises:
            InvalidRequest: it cannot be followed, or something else in ``params`` that the model does not have.
        """
        self._engine.check_controls(params)

    def generate(self, prompt: str | list[int], params: SamplingParams, request_id: str | None = None, *,
                 priority: int = 0, cache_salt: str | None = None) -> AsyncIterator[OutputDelta]:  # fmt: skip
        """Queues a request; returns the iterator of its deltas.

        Raises:
            InvalidRequest, CapacityError, EngineDead: at once, before anything is queued.
        """
        self._check_open()
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._engine.check(ids, params, priority)
        request_id = request_id or f"req-{next(self._ids)}"
        request = Request(request_id, tuple(ids), params, text, priority=priority, cache_salt=cache_salt)
        stream = OutputStream(self, request)
        self._accept(request, stream)
        self._commands.put(lambda: self._add(request, stream))
        return stream

    def _check_open(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._draining:
            raise CapacityError("the server is shutting down; try another one", retry_after_s=10)

    def _accept(self, request: Request, stream: OutputStream) -> None:
        """Registers a stream. From here on its end is owed to it, whatever becomes of the step thread."""
        config, params = self.config, request.params
        with self._lock:
            self._check_open()  # again: it may have died since
            if request.request_id in self._streams:
                raise InvalidRequest(f"request id {request.request_id!r} is already in use", param="request_id")
            limit = config.max_queued_requests + config.max_running_requests
            if self._num_open + params.n > limit:
                raise CapacityError(
                    f"{self._num_open} sequences are open, the limit is {limit} "
                    "(--max-queued-requests + --max-running-requests); try again later",
                    status=429,
                )
            self._num_open += params.n
            self._streams[request.request_id] = stream

    async def flush_cache(self) -> int:
        """Forgets cached prefixes; returns the number of pages that freed.

        Raises:
            CapacityError: requests run or wait.
            EngineDead: nobody is there to do it.
        """
        if self._dead is not None or not self._thread.is_alive():
            raise EngineDead(self._dead or "it is not running")
        flushed: concurrent.futures.Future[int] = concurrent.futures.Future()

        def flush() -> None:
            try:
                flushed.set_result(self._engine.flush_cache())
            except CapacityError as error:
                flushed.set_exception(error)

        self._commands.put(flush)
        return await asyncio.wrap_future(flushed)

    def abort(self, request_id: str) -> bool:
        """Ends a request; its iterator ends after deltas with finish reason ``abort``. False if it is not known."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        self.abort_stream(stream)
        return True

    def abort_stream(self, stream: OutputStream) -> None:
        """Ends the request of one stream, and no later one that was given the same id. Takes no lock: the garbage
        collector may call it anywhere."""
        self._commands.put(lambda: self._abort(stream))

    # -- the step thread ---------------------------------------------------------------------------------------------

    def _add(self, request: Request, stream: OutputStream) -> None:
        try:
            self._engine.add(request)
        except (InvalidRequest, CapacityError) as error:  # all was checked before; but it must not end the thread
            self._ended(request.params.n, request.request_id)
            put_all_from_thread(stream.loop, [(stream, [error])])

    def _abort(self, stream: OutputStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            self._deliver(self._engine.abort(stream.request_id))

    def _ended(self, count: int, request_id: str) -> None:
        with self._lock:
            self._num_open -= count
            if request_id not in self._engine.open_requests:
                del self._streams[request_id]

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        by_request: dict[str, Items] = {}
        for delta in deltas:
            by_request.setdefault(delta.request_id, []).append(delta)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Items]]] = {}
        for request_id, items in by_request.items():
            finished = sum(1 for d in items if isinstance(d, OutputDelta) and d.finish_reason is not None)
            stream = self._streams[request_id]
            if finished:
                self._ended(finished, request_id)
            by_loop.setdefault(stream.loop, []).append((stream, items))
        for loop, batch in by_loop.items():
            if not put_all_from_thread(loop, batch):
                for stream, _ in batch:
                    self._abort(stream)

    def _run(self) -> None:
        try:
            while True:
                try:
                    # Sleep only when idle; otherwise take whatever has arrived and go on.
                    command = self._commands.get(block=not self._engine.has_work)
                    while True:
                        if command is None:
                            return
                        command()
                        command = self._commands.get(block=False)
                except queue.Empty:
                    pass
                if self._engine.has_work:
                    with self._watchdog.watching():
                        deltas = self._engine.step()
                    if self._dead is not None:
                        return  # it came back too late: everybody has been told
                    self._deliver(deltas)
        except BaseException as error:
            log.exception("the step loop stopped")
            self._end_all(f"{type(error).__name__}: {error}")
            if isinstance(error, RaceError):
                self.fatal.set_exception(error)
        finally:
            self._watchdog.close()
            self._end_all(None)  # what was accepted after the last command
            self._engine.close()

    def _stalled(self, message: str) -> None:
        """The watchdog's report: nobody waits any longer, and the process should end."""
        log.error("%s", message)
        self._end_all(message)
        self.fatal.set_exception(EngineDead(message))

    def _end_all(self, failure: str | None) -> None:
        """Ends every stream there still is with EngineDead; ``failure`` None means that the engine was told to stop."""
        with self._lock:
            self._dead = self._dead or failure
            self._draining = True
            streams = list(self._streams.values())
            self._streams.clear()
            self._num_open = 0
        for stream in streams:
            put_all_from_thread(stream.loop, [(stream, [EngineDead(failure or "it was shut down")])])

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the step thread."""
        if not self._thread.is_alive():
            self._thread.start()
            self._watchdog.start()

    async def stop(self, drain_s: float = 5.0) -> None:
        """Refuses new requests, lets running ones finish for ``drain_s`` seconds, aborts the rest, ends the thread."""
        with self._lock:
            self._draining = True
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._streams and asyncio.get_running_loop().time() < deadline and self._thread.is_alive():
            await asyncio.sleep(0.02)
        self._commands.put(self._abort_all)
        self._commands.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 2.0)

    def _abort_all(self) -> None:
        for stream in list(self._streams.values()):
            self._abort(stream)
