"""What became of a backend's declarations: counted, and said once."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

from jaxserve.attention.base import AttentionBackend, SharedReadEnds
from jaxserve.core.forward_mode import ForwardMode

log = logging.getLogger(__name__)


class Demotion(NamedTuple):
    """An execution whose reads end elsewhere than its backend declared: names of both, and of the backend."""

    declared: str
    resolved: str
    backend: str


class Demotions:
    """Executions that did not get what their backend declared.

    Attributes:
        counts: how many, by what was declared, what it became, and the backend.
    """

    def __init__(self) -> None:
        self.counts: Counter[Demotion] = Counter()
        self._warned: set[tuple[str, ForwardMode]] = set()

    def note(self, backend: AttentionBackend, mode: ForwardMode, declared: SharedReadEnds,
             resolved: SharedReadEnds) -> None:  # fmt: skip
        """Counts one execution if it was demoted; warns once per backend and mode, also of one that is not audited."""
        unaudited = resolved is SharedReadEnds.UNKNOWN and mode is not ForwardMode.EXTEND
        if resolved is declared and not unaudited:
            return
        name = backend.name or type(backend).__name__
        if resolved is not declared:
            self.counts[Demotion(declared.name, resolved.name, name)] += 1
        if (name, mode) not in self._warned:
            self._warned.add((name, mode))
            log.warning("%s", _advice(name, mode, declared, resolved))


def _advice(name: str, mode: ForwardMode, declared: SharedReadEnds, resolved: SharedReadEnds) -> str:
    said = f"attention backend {name!r} declares {declared.name} for {mode.name}"
    if resolved is SharedReadEnds.PRE_REPLAY:
        return (
            f"{said}, but programs hold no read-done marker: its reads are launched as a program of their own "
            "(PRE_REPLAY), one more launch per step; leave out --no-shared-read-marker"
        )
    if resolved is SharedReadEnds.POST_REPLAY:
        return (
            f"{said}, but programs hold no read-done marker, and its reads of live rows cannot be hoisted: row writes "
            "wait for the end of each program (POST_REPLAY); leave out --no-shared-read-marker, or choose another "
            "--attention-backend"
        )
    return (
        f"{said}: its reads have not been audited, so row writes wait for whole executions (coarse fence); define "
        "shared_read_ends() and prove it with jaxserve.testing.conformance"
    )
