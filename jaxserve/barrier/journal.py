"""The journal: what streams, executions and host threads did to shared rows and to each other, in one order.

The native recorder (``csrc/common/journal.h``) is off until somebody subscribes. Every subscriber is handed every entry
recorded since it subscribed, whoever pumps. CPU only: on a GPU things happen where no handler of ours looks.

An entry names an actor, a subject, and two numbers whose meaning depends on its ``Kind``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import CodeType, FrameType
from typing import Any

import numpy as np

from jaxserve.barrier.native import native_module

ENTRY = np.dtype(
    [
        ("time_ns", "<i8"),  # time.perf_counter_ns()
        ("kind", "<u4"),
        ("origin", "<u4"),  # index into strings(): the source line on whose behalf it happens; 0 is not known
        ("actor", "<u8"),  # ActorType in the top byte, its number below
        ("subject", "<u8"),
        ("a", "<u8"),
        ("b", "<u8"),
    ]
)
DEFAULT_CAPACITY = 1_000_000  # undrained entries; 48 MB


class ActorType(IntEnum):
    """What the top byte of ``actor`` says; the rest is the thread's number, the stream's id, or the launch id."""

    HOST = 1
    STREAM = 2
    EXECUTION = 3


class Kind(IntEnum):
    """What happened. ``columns`` stands for ``first_column << 32 | num_columns``."""

    ENQUEUE = 1  # host puts an operation on a stream: subject=stream, a=number, b=OperationType
    BEGIN_OPERATION = 2  # the stream starts it: the same
    END_OPERATION = 3  # it has had its effects: the same
    RELEASE = 4  # a generation is recorded: subject=ring, a=generation
    ACQUIRE = 5  # a wait for it returned, or a poll said yes: subject=ring, a=generation, b=Outcome
    READ = 6  # subject=buffer, a=row, b=columns
    WRITE = 7  # the same
    STAGE = 8  # subject=staging area, a=block, b=StageStep
    DISPATCH = 9  # host launches a program (origin: its label): subject=launch, a=step number, b=launch before it, or 0
    BEGIN_EXECUTION = 10  # its first handler runs: subject=launch
    END_EXECUTION = 11  # its end record runs: subject=launch
    COLLECT = 12  # a host thread has seen that it ended, well or not: subject=launch
    RESERVE = 13  # subject=ring, a=generation
    ABANDON = 14  # the same
    OPERAND = 15  # it takes outputs of one more launch: subject=launch, a=that launch
    SYNC_STREAM = 16  # host saw the stream idle: subject=stream, a=number of the newest finished operation
    GIVE_UP = 17  # nothing of a launch will be delivered: subject=launch


class OperationType(IntEnum):
    """``b`` of the stream operations."""

    COPY = 1
    WAIT = 2
    RECORD = 3


class Outcome(IntEnum):
    """``b`` of ACQUIRE."""

    RECORDED = 0
    ABANDONED = 1
    SUPERSEDED = 2  # the slot serves a later generation: this one was recorded or abandoned before


class StageStep(IntEnum):
    """``b`` of STAGE."""

    FILL = 1  # host
    READ = 2  # stream
    RELEASE = 3  # stream: the block is free
    ACQUIRE = 4  # host saw it free


Consumer = Callable[[np.ndarray, int], None]
_on = False
_consumers: list[Consumer] = []
_lock = threading.RLock()


def _recorder() -> Any:
    return native_module("cpu").journal


class Subscription:
    """Keeps the journal on for one consumer until it is closed."""

    def __init__(self, consumer: Consumer):
        self._consumer = consumer

    def close(self) -> None:
        """Ends it; the journal goes off with the last one. Entries not pumped yet are not handed out. Idempotent."""
        with _lock:
            if self._consumer in _consumers:
                _consumers.remove(self._consumer)
                if not _consumers:
                    stop()


def subscribe(consumer: Consumer, capacity: int = DEFAULT_CAPACITY) -> Subscription:
    """Turns the journal on for ``consumer(entries, num_dropped)``, which ``pump`` calls.

    Args:
        consumer: gets entries (array of ENTRY) in order; with ``num_dropped`` > 0 the log has a hole somewhere before
            the next call, and nothing may be concluded from it. Must not raise.
        capacity: most entries between two pumps; the first subscriber decides.
    """
    with _lock:
        if _consumers:
            pump()  # what is there already is not for the newcomer
        else:
            start(capacity)
        _consumers.append(consumer)
    return Subscription(consumer)


def pump() -> None:
    """Hands what was recorded since the last pump to every subscriber. Any thread may call it."""
    with _lock:
        if not _consumers:
            return
        entries, num_dropped = drain()
        if len(entries) or num_dropped:
            for consumer in list(_consumers):
                consumer(entries, num_dropped)


def start(capacity: int = DEFAULT_CAPACITY) -> None:
    """Turns the recorder on, empty. With subscribers use ``subscribe`` instead."""
    global _on
    _recorder().start(capacity)
    _on = True


def stop() -> None:
    """Turns the recorder off. What it holds can still be drained."""
    global _on
    _on = False
    _recorder().stop()


def is_on() -> bool:
    """Whether anything is recorded now."""
    return _on


def drain() -> tuple[np.ndarray, int]:
    """Takes (entries, how many found no room) out of the recorder, past every subscriber. See ``pump``."""
    data, num_dropped = _recorder().drain()
    return np.frombuffer(data, ENTRY), num_dropped


def names() -> dict[int, str]:
    """Id -> name of every ring ("write_done", "target.read_done"), buffer ("block_tables"), stream and staging area."""
    return _recorder().names()


def strings() -> list[str]:
    """What ``origin`` indexes."""
    return _recorder().strings()


# -- what Python adds --------------------------------------------------------------------------------------------------


def dispatch(launch: int, step_number: int, label: str, after: Sequence[int]) -> None:
    """Journals that a program is about to be dispatched; see ``FenceChannel.dispatching``."""
    recorder = _recorder()
    recorder.append(Kind.DISPATCH, launch, step_number, after[0] if after else 0, recorder.intern(label))
    for operand in after[1:]:
        recorder.append(Kind.OPERAND, launch, operand, 0, 0)


def collected(launch: int) -> None:
    """Journals that this thread has seen a launch end. Call it after the results were there."""
    if _on:
        _recorder().append(Kind.COLLECT, launch, 0, 0, 0)


def gave_up(launch: int) -> None:
    """Journals that nothing a launch computes will be delivered. Call it before its records are abandoned."""
    if _on:
        _recorder().append(Kind.GIVE_UP, launch, 0, 0, 0)


def host_access(kind: Kind, buffer: int, row: int, columns: int = 0) -> None:
    """Journals that this thread READs or WRITEs a row of a shared buffer (its id) without any stream or program."""
    if _on:
        recorder = _recorder()
        frame = sys._getframe(1)
        recorder.append(kind, buffer, row, columns, _origin(frame.f_code, frame.f_lineno))


def set_origin_here(own_file: str) -> None:
    """Names the innermost caller outside ``own_file`` as the source line of what this thread enqueues from now on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == own_file:
        frame = frame.f_back
    if frame is not None:
        _recorder().set_origin(_origin(frame.f_code, frame.f_lineno))


_origins: dict[tuple[CodeType, int], int] = {}


def _origin(code: CodeType, line: int) -> int:
    index = _origins.get((code, line))
    if index is None:
        index = _origins[code, line] = _recorder().intern(f"{short_path(code.co_filename)}:{line} {code.co_name}")
    return index


def short_path(path: str) -> str:
    """``scheduler/scheduler.py``: the last two parts of a path."""
    return "/".join(path.replace("\\", "/").split("/")[-2:])
