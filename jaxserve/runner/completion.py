"""Records the end of executions from the host, for programs compiled without the end record."""

from __future__ import annotations

import logging
import queue
import threading

import jax

from jaxserve.barrier import journal
from jaxserve.barrier.tickets import Event

log = logging.getLogger(__name__)


class CompletionWatcher:
    """A thread that blocks on each launch's outputs in turn and then records its events.

    Only the fallback without FFI operations needs it: one more thread wake-up per step than the record inside the
    program.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[jax.Array, list[Event], int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jaxserve-completion", daemon=True)
        self._thread.start()

    def watch(self, output: jax.Array, events: list[Event], launch: int = 0) -> None:
        """Records ``events`` once ``output`` (and so the execution that made it, ``launch``) is ready."""
        self._queue.put((output, events, launch))

    def close(self) -> None:
        """Ends the thread after what is queued."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            output, events, launch = item
            try:
                jax.block_until_ready(output)
            except Exception:  # the collector of the step raises it to whoever asked; here only waiters must not hang
                journal.gave_up(launch)
                for event in events:
                    event.abandon()
                continue
            journal.collected(launch)
            for event in events:
                try:
                    event.record()
                except Exception:  # the execution has ended, so its waiters may go on
                    log.exception("a record of %s failed and is given up", event.ring.name)
                    event.abandon()
