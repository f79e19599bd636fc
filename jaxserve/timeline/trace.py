"""Records a timeline and writes it to a file when closed, or when the interpreter exits."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxserve.barrier import journal
from jaxserve.core.errors import ConfigError
from jaxserve.timeline.build import build_timeline
from jaxserve.timeline.chrome_trace import write_chrome_trace
from jaxserve.timeline.device_records import DeviceRecords, read_journal
from jaxserve.timeline.model import Timeline
from jaxserve.timeline.recorder import RECORDER, HostRecords

log = logging.getLogger(__name__)

NEWEST_ENTRIES = 1 << 19  # journal entries kept, 48 bytes each: some minutes of steps of a small model
NEWEST_SPANS = 1 << 17  # host spans kept, about 500 bytes each
PUMP_EVERY_S = 0.1
SUFFIXES = (".json", ".json.gz")


def check_trace_path(path: str | Path) -> Path:
    """The path a trace is to be written to; see ``check_output_path``."""
    return check_output_path(path, "a trace", SUFFIXES)


def check_output_path(path: str | Path, what: str, suffixes: Sequence[str]) -> Path:
    """A path that ``what`` is to be written to, checked before any work is done for it.

    Raises:
        ConfigError: another suffix, or a folder that is not there or cannot be written to.
    """
    checked = Path(path).expanduser()
    if not checked.name.endswith(tuple(suffixes)):
        raise ConfigError(f"{what} is written as {' or '.join(suffixes)}, got {str(path)!r}")
    if checked.is_dir():
        raise ConfigError(f"{checked} is a folder; name a file in it, like {checked / ('name' + suffixes[-1])}")
    if not checked.parent.is_dir():
        raise ConfigError(f"there is no folder {checked.parent}; make it, or write {what} elsewhere")
    try:
        with checked.with_name(checked.name + ".part").open("wb"):
            pass
        checked.with_name(checked.name + ".part").unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {what} to {checked}: {error.strerror}") from None
    return checked


class Recording:
    """A timeline being recorded: the process's host spans, and its journal, of which it keeps the newest entries.

    Raises:
        ConfigError: from ``start``, if one is being recorded already.
    """

    def __init__(self, newest_entries: int = NEWEST_ENTRIES, newest_spans: int = NEWEST_SPANS):
        self._newest_entries, self._newest_spans = newest_entries, newest_spans
        self._chunks: deque[np.ndarray] = deque()
        self._num_kept = self._num_dropped = 0
        self._stopping = threading.Event()
        self._pumper = threading.Thread(target=self._pump_until_stopped, name="jaxserve-trace", daemon=True)

    def start(self) -> Recording:
        """From here on everything is recorded. Call it when JAX knows its platform."""
        RECORDER.start(self._newest_spans)
        self._subscription = journal.subscribe(self._keep)
        self._pumper.start()
        return self

    def stop(self) -> Timeline:
        """Ends the recording; the timeline of it, or of its newest part."""
        host, device = self.records()
        timeline = build_timeline(host, device)
        if jax.default_backend() != "cpu":
            timeline.remarks.append("the schedule stream and executions of a GPU are not recorded; see Nsight Systems")
        return timeline

    def records(self) -> tuple[HostRecords, DeviceRecords]:
        """Ends the recording; what the host and what the device did."""
        host = RECORDER.stop()
        self._stopping.set()
        self._pumper.join()
        journal.pump()
        self._subscription.close()
        entries = np.concatenate(self._chunks) if self._chunks else np.zeros(0, journal.ENTRY)
        return host, read_journal(entries, journal.names(), journal.strings(), self._num_dropped)

    def _pump_until_stopped(self) -> None:
        while not self._stopping.wait(PUMP_EVERY_S):
            journal.pump()

    def _keep(self, entries: np.ndarray, num_dropped: int) -> None:
        """Keeps entries, as the journal hands them out, and lets go of the oldest."""
        self._num_dropped += num_dropped
        self._chunks.append(entries)
        self._num_kept += len(entries)
        while self._num_kept > self._newest_entries:
            surplus = self._num_kept - self._newest_entries
            oldest = self._chunks.popleft()
            if len(oldest) > surplus:
                self._chunks.appendleft(oldest[surplus:])
            dropped = min(surplus, len(oldest))
            self._num_dropped += dropped
            self._num_kept -= dropped


class Trace:
    """A timeline recorded into a file, written once: by ``close``, or when the interpreter exits.

    Args:
        path: ``.json`` or ``.json.gz``, checked at once.

    Raises:
        ConfigError: the path; or, from ``start``, a timeline is being recorded already.
    """

    def __init__(self, path: str | Path, recording: Recording | None = None):
        self.path = check_trace_path(path)
        self._recording = recording or Recording()
        self._lock = threading.Lock()
        self._running = False

    def start(self) -> Trace:
        """From here on everything is recorded."""
        self._recording.start()
        self._running = True
        atexit.register(self.close)
        return self

    def close(self) -> None:
        """Writes the file. Idempotent; whoever comes second waits until it is written."""
        with self._lock:
            if not self._running:
                return
            self._running = False
            atexit.unregister(self.close)
            start = time.monotonic()
            timeline = self._recording.stop()
            write_chrome_trace(timeline, self.path)
            for remark in timeline.remarks:
                log.warning("%s: %s", self.path, remark)
            log.info("wrote %s (%d slices) in %.1f s", self.path, len(timeline.slices), time.monotonic() - start)

    def __enter__(self) -> Trace:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()
