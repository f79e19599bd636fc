"""The race check: fails on the first access to a shared row that nothing orders, even if the tokens came out right.

    check = RaceCheck()      # the journal goes on
    ...                      # launches, row writes
    check.check()            # RaceError names both sides

Programs whose reads no handler of ours sees (no marker, live reads) must be built with ``EngineConfig.race_check``,
which compiles notes into them. The unit is a row: two accesses to different columns of one row count as a conflict.
"""

from __future__ import annotations

import numpy as np

from jaxserve.barrier import journal
from jaxserve.barrier.happens_before import Access, HappensBefore, Race
from jaxserve.barrier.journal import ActorType
from jaxserve.core.errors import JaxserveError, RaceError


class RaceCheck:
    """Follows the journal of the whole process from its construction on. Any thread may use it.

    Executions dispatched before that are ignored. It keeps the newest accesses only, so its memory does not grow.
    """

    def __init__(self) -> None:
        self._order = HappensBefore()
        self._found: str | None = None
        self._num_dropped = 0
        self._subscription = journal.subscribe(self._take)

    def _take(self, entries: np.ndarray, num_dropped: int) -> None:
        self._num_dropped += num_dropped
        if self._found is not None or self._num_dropped:
            return
        for entry in entries.tolist():
            race = self._order.take(entry)
            if race is not None:
                self._found = report(race, journal.names(), journal.strings())
                return

    def check(self) -> None:
        """Looks at everything that happened so far.

        Raises:
            RaceError: two accesses were not ordered; again on every later call.
            JaxserveError: the journal had no room for everything, so nothing can be said.
        """
        journal.pump()
        if self._found is not None:
            raise RaceError(self._found)
        if self._num_dropped:
            raise JaxserveError(
                f"the race check lost {self._num_dropped} journal entries and can say nothing; check() more often"
            )

    def close(self) -> None:
        """Stops following. Idempotent."""
        self._subscription.close()


# -- the report --------------------------------------------------------------------------------------------------------


def report(race: Race, names: dict[int, str], strings: list[str]) -> str:
    """Four lines: the place, both sides, and what they had waited for."""
    sides = [race.first, race.second]
    write, other = sorted(sides, key=lambda access: not access.is_write)
    place = names.get(race.subject, f"buffer {race.subject}")
    unit = "block" if race.is_staging else "row"
    lines = [f"race on {place} {unit} {race.row}{_columns(write, other)}"]
    verbs = ("fill", "read") if race.is_staging else ("write", "read")
    for access in (write, other):
        verb = verbs[0] if access.is_write else verbs[1]
        lines.append(f"  {verb:6} by {_who(access, names, strings)}{_where(access, strings)}")
    waits = "; ".join(_waited(access, names, strings) for access in (write, other))
    lines.append(f"  nothing orders them: {waits}")
    return "\n".join(lines)


def _columns(one: Access, other: Access) -> str:
    spans = [(access.columns >> 32, (access.columns >> 32) + (access.columns & 0xFFFFFFFF)) for access in (one, other)]
    first, end = max(start for start, _ in spans), min(end for _, end in spans)
    if first >= end:
        return ""
    return f" (column {first})" if end == first + 1 else f" (columns {first}..{end - 1})"


def _name(access: Access, names: dict[int, str]) -> str:
    number = access.actor & (1 << 56) - 1
    if access.launch is not None:
        return f"step {access.launch.step}'s execution"
    if access.actor >> 56 == ActorType.STREAM:
        return f"the {names.get(number, f'stream {number}')}"
    return f"host thread {number}"


def _who(access: Access, names: dict[int, str], strings: list[str]) -> str:
    who = _name(access, names)
    if access.launch is not None:
        return f"{who} ({strings[access.launch.label]})"
    if access.actor >> 56 == ActorType.STREAM and access.newest_step:
        return f"{who}, enqueued after the launch of step {access.newest_step}"
    return who


def _where(access: Access, strings: list[str]) -> str:
    return f", at {strings[access.origin]}" if access.origin else ""


def _waited(access: Access, names: dict[int, str], strings: list[str]) -> str:
    who = _name(access, names)
    if not access.waited:
        return f"{who} had waited for nothing"
    ring, (generation, origin) = list(access.waited.items())[-1]
    where = f" (at {strings[origin]})" if origin else ""
    return f"{who} had last waited for {names.get(ring, f'ring {ring}')} generation {generation}{where}"
