"""A timeline: slices and instants on lanes, arrows between slices. All times are ``perf_counter_ns``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Lane(NamedTuple):
    """One row of the picture.

    Attributes:
        group: what it belongs to, e.g. ``executions``.
        name: e.g. ``target``.
    """

    group: str
    name: str


@dataclass(frozen=True)
class Slice:
    """Something that takes time. Slices of a lane nest or follow each other."""

    lane: Lane
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Instant:
    """Something at a moment."""

    lane: Lane
    name: str
    time_ns: int
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrow:
    """What happened first, and what could happen because of it; each end lies in a slice of its lane."""

    name: str
    from_lane: Lane
    from_ns: int
    to_lane: Lane
    to_ns: int


@dataclass
class Timeline:
    """Everything to be shown.

    Attributes:
        lanes: in the order in which they should be shown.
        remarks: what a reader must know, e.g. that older entries were dropped.
    """

    lanes: list[Lane] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def extend(self, later: Timeline) -> None:
        """Adds another timeline of the same process."""
        self.lanes += [lane for lane in later.lanes if lane not in self.lanes]
        self.slices += later.slices
        self.instants += later.instants
        self.arrows += later.arrows
        self.remarks += later.remarks
