"""Draws a step behind the fine fence above the same step behind the coarse one, on the same time axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.timeline.build import bytes_of
from jaxserve.timeline.drawing import STYLES, Drawing, Line, Rect, Text, nice_step, text_width
from jaxserve.timeline.step_view import StepView

WIDTH, LEFT, RIGHT, COLUMN_GAP = 800.0, 104.0, 14.0, 32.0
FIRST_COLUMN = 0.62  # share of the width: the whole step; the rest: the hand-over to the next one
LANES = ("host", "schedule stream", "execution")
LANE_HEIGHT, BAR_HEIGHT, LANE_GAP = 28.0, 20.0, 20.0
ROW_HEIGHT, ROW_GAP = 3 * LANE_HEIGHT + 2 * LANE_GAP, 48.0
TOP, BOTTOM = 82.0, 80.0
THINNEST = 1.6  # points: what is shorter is still seen
HOST_STYLES = {"plan": "plan", "dispatch": "launch", "barrier": "launch", "launch": "launch", "collect": "collect",
               "commit": "commit"}  # fmt: skip


@dataclass(frozen=True)
class _Column:
    """A time axis: ``low`` .. ``high`` ns, counted from ``zero`` of a view, at ``x`` .. ``x + width`` points."""

    x: float
    width: float
    low: float
    high: float
    unit_ns: float
    unit: str
    zero: Callable[[StepView], int]

    def at(self, view: StepView, time_ns: int) -> float:
        moment = min(max(time_ns - self.zero(view), self.low), self.high)
        return self.x + (moment - self.low) / (self.high - self.low) * self.width

    def shows(self, view: StepView, start_ns: int, end_ns: int) -> bool:
        return end_ns - self.zero(view) > self.low and start_ns - self.zero(view) < self.high


def draw_steps(views: Sequence[StepView], subtitle: str) -> Drawing:
    """One row of lanes per view (fine above coarse), a column for the whole step and one for its end."""
    height = TOP + len(views) * ROW_HEIGHT + (len(views) - 1) * ROW_GAP + BOTTOM
    drawing = Drawing(WIDTH, height, finding(views))
    size = min(12.0, (WIDTH - 28) / text_width(drawing.title, 1, bold=True))
    drawing.shapes += [Text(14, 24, drawing.title, size, bold=True), Text(14, 40, subtitle, 8.5, tone="soft")]
    columns = _columns(views)
    for number, view in enumerate(views):
        _Row(drawing, view, TOP + number * (ROW_HEIGHT + ROW_GAP), columns).draw(last=number == len(views) - 1)
    _legend(drawing, height - 26)
    return drawing


def finding(views: Sequence[StepView]) -> str:
    """What the pictures say, in one sentence."""
    if not any(_while_it_runs(view) for view in views):
        kinds = " and ".join(view.fence.partition(":")[0] for view in views)
        return f"Rows of the next step are in place only after a step has ended ({kinds} fence)"
    parts = []
    for view in views:
        kind, into = view.fence.partition(":")[0], _ms(view.times.in_place)
        where = f"{into} ms into a step" if _while_it_runs(view) else f"after it has ended, at {into} ms"
        parts.append(f"{where} ({kind} fence)")
    return f"Rows of the next step are in place {', or '.join(parts)}"


def _while_it_runs(view: StepView) -> bool:
    return view.times.in_place < view.times.execution


def _columns(views: Sequence[StepView]) -> list[_Column]:
    usable = WIDTH - LEFT - RIGHT - COLUMN_GAP
    longest = max(view.times.execution for view in views)
    gap = max(view.times.gap for view in views)
    first, second = usable * FIRST_COLUMN, usable * (1 - FIRST_COLUMN)
    unit_ns, unit = (1e6, "ms") if longest > 2e6 else (1e3, "µs")
    return [
        _Column(LEFT, first, -0.07 * longest, 1.1 * longest + gap, unit_ns, unit, lambda view: view.zero_ns),
        _Column(LEFT + first + COLUMN_GAP, second, -0.42 * gap, 1.35 * gap, 1e3, "µs", lambda v: v.step.end_ns or 0),
    ]


class _Row:
    def __init__(self, drawing: Drawing, view: StepView, y: float, columns: list[_Column]):
        self._shapes, self._view, self._y, self._columns = drawing.shapes, view, y, columns
        self._labels: list[tuple[float, float, float]] = []  # left, right and baseline of the names of arrows

    def draw(self, last: bool) -> None:
        view, times = self._view, self._view.times
        kind, _, reason = view.fence.partition(":")
        heading = f"{kind.capitalize()} fence ({reason})"
        self._text(LEFT, self._y - 12, heading, 10, bold=True)
        fact = f"rows of N+1 in place after {_ms(times.in_place)} "
        fact += f"of {_ms(times.execution)} ms" if _while_it_runs(view) else "ms, N had ended"
        self._text(LEFT + text_width(heading, 10, bold=True) + 10, self._y - 12, fact)
        self._text(self._columns[1].x, self._y - 12, "Hand-over", 10, bold=True)
        x = self._columns[1].x + text_width("Hand-over", 10, bold=True) + 10
        self._text(x, self._y - 12, f"N+1 computes {times.gap / 1e3:.0f} µs after N ended")
        for lane, name in enumerate(LANES):
            self._text(LEFT - 8, self._lane_y(lane) + LANE_HEIGHT / 2 + 3, name, 9, anchor="end", bold=True)
        for column in self._columns:
            for lane in range(3):
                self._shapes.append(Rect(column.x, self._lane_y(lane), column.width, LANE_HEIGHT, "lane"))
            self._axis(column, last)
            self._host(column)
            self._executions(column)
            self._stream(column)
            self._arrows(column)

    # -- lanes -----------------------------------------------------------------------------------------------------

    def _host(self, column: _Column) -> None:
        outer = [s for s in self._view.spans if s.name in ("plan", "launch", "collect", "commit")]
        for span in sorted(outer, key=lambda s: s.name != "collect"):
            step = self._name(span.args.get("step"))
            tip = f"{span.name} {step}: {_ms(span.end_ns - span.start_ns)} ms"
            label = f"collect {step}" if span.name == "collect" else ""
            self._bar(column, 0, span.start_ns, span.end_ns, HOST_STYLES[span.name], tip, label)

    def _stream(self, column: _Column) -> None:
        view = self._view
        for operation in view.operations:
            if operation.type == "wait" and operation.end_ns is not None and operation.waited is not None:
                ring, generation = operation.waited.ticket
                tip = f"wait {ring} {generation}: {_ms(operation.end_ns - operation.begin_ns)} ms"
                self._bar(column, 1, operation.begin_ns, operation.end_ns, "idle", tip)
        copies = [o for o in view.operations if o.type == "copy"]
        held_until = 0  # copies queue up behind each other; what they stood behind is drawn once
        for copy in copies:
            if copy.enqueue_ns is not None and copy.enqueue_ns >= held_until:
                held_until = copy.begin_ns
                label = f"row writes held up {_ms(held_until - copy.enqueue_ns)} ms"
                self._bar(column, 1, copy.enqueue_ns, held_until, "held", label, label)
        for copy in copies:
            names = ", ".join(dict.fromkeys(write.buffer for write in copy.writes))
            end_ns = copy.end_ns or copy.begin_ns
            took = (end_ns - copy.begin_ns) / 1e3
            tip = f"write {names}: {len(copy.writes)} rows, {bytes_of(copy)} bytes, {took:.1f} µs"
            self._bar(column, 1, copy.begin_ns, end_ns, "write", tip)

    def _executions(self, column: _Column) -> None:
        view = self._view
        for execution in (view.before, view.after, view.step):
            begin, end, read = execution.begin_ns, execution.end_ns, execution.record_on("read_done")
            if begin is None or end is None or read is None:
                continue
            name = self._name(execution.step)
            whole = f"step {execution.step}: {_ms(end - begin)} ms"
            reads_from = execution.waited.time_ns if execution.waited is not None else begin
            label = f"step {name}" + (f": {_ms(end - begin)} ms" if execution is view.step else "")
            style = "compute" if execution is view.step else "other"
            self._bar(column, 2, read.time_ns, end, style, f"{whole}; computes", label)
            if execution.waited is not None:
                tip = f"{whole}; waits {(reads_from - begin) / 1e3:.1f} µs for its rows"
                self._bar(column, 2, begin, reads_from, "raw", tip)
            tip = f"{whole}; reads shared rows for {(read.time_ns - reads_from) / 1e3:.1f} µs, then records read_done"
            self._bar(column, 2, reads_from, read.time_ns, "read", tip)

    def _arrows(self, column: _Column) -> None:
        view = self._view
        waited = {o.waited.ticket: o.waited for o in view.operations if o.waited is not None}
        for execution in (view.step, view.after):
            for source in execution.records:
                target = waited.get(source.ticket)
                if target is not None:
                    ring = source.ticket.ring.rpartition(".")[2]
                    label = f"{ring}({self._name(execution.step)})"
                    self._arrow(column, 2, source.time_ns, 1, target.time_ns, label, "war")
        published, after = view.published.recorded, view.after.waited
        if published is not None and after is not None:
            self._arrow(column, 1, published.time_ns, 2, after.time_ns, "write_done(N+1)", "ink")

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _name(self, step: int | None) -> str:
        """``N-1`` for the number of the step before."""
        offset = (step or 0) - self._view.step.step
        return "N" if offset == 0 else f"N{offset:+d}"

    def _lane_y(self, lane: int) -> float:
        return self._y + lane * (LANE_HEIGHT + LANE_GAP)

    def _text(self, x: float, y: float, text: str, size: float = 8.5, **more) -> None:
        self._shapes.append(Text(x, y, text, size, **more))

    def _bar(
        self, column: _Column, lane: int, start_ns: int, end_ns: int, style: str, tip: str, label: str = ""
    ) -> None:
        if not column.shows(self._view, start_ns, end_ns):
            return
        x, end = column.at(self._view, start_ns), column.at(self._view, end_ns)
        y = self._lane_y(lane) + (LANE_HEIGHT - BAR_HEIGHT) / 2
        self._shapes.append(Rect(x, y, max(end - x, THINNEST), BAR_HEIGHT, style, tip))
        width = text_width(label, 8)
        if label and width + 6 < end - x:
            middle = (x + end) / 2
            if STYLES[style].hatched:
                self._shapes.append(Rect(middle - width / 2 - 3, y + 3, width + 6, BAR_HEIGHT - 6, "plate", tip))
            self._text(middle, y + BAR_HEIGHT / 2 + 3, label, 8, anchor="middle")

    def _arrow(self, column: _Column, lane: int, from_ns: int, to_lane: int, to_ns: int, label: str, tone: str) -> None:
        if not column.shows(self._view, from_ns, to_ns + 1):
            return
        inset = (LANE_HEIGHT - BAR_HEIGHT) / 2
        y = self._lane_y(lane) + (LANE_HEIGHT - inset if to_lane > lane else inset)
        to_y = self._lane_y(to_lane) + (inset if to_lane > lane else LANE_HEIGHT - inset)
        x, to_x = column.at(self._view, from_ns), column.at(self._view, to_ns)
        self._shapes.append(Line(x, y, to_x, to_y, tone, arrow=True, tip=f"{label}: {(to_ns - from_ns) / 1e3:.1f} µs"))
        self._label(column, min(x, to_x), max(x, to_x), self._lane_y(min(lane, to_lane)) + LANE_HEIGHT, label, tone)

    def _label(self, column: _Column, left: float, right: float, top: float, label: str, tone: str) -> None:
        """Names an arrow that spans ``left`` .. ``right`` in the gap below ``top``, where there is room; else hovering
        must do."""
        width = text_width(label, 8)
        # Labels of waits stand near the stream, those of writes near the execution, so that they miss each other.
        first, second = (top + 8, top + LANE_GAP - 2) if tone == "war" else (top + LANE_GAP - 2, top + 8)
        beside = [right + 4, left - 4 - width]
        if column is self._columns[1] and tone == "war":  # there the other arrow leaves to the right
            beside.reverse()
        within = [left + (right - left) * 0.6 - width] if right - left > width / 2 else []
        for x, y in itertools.product([*within, *beside] if tone == "ink" else [*beside, *within], (first, second)):
            box = (x - 2, x + width + 2, y)
            free = all(box[1] <= other[0] or other[1] <= box[0] or y != other[2] for other in self._labels)
            if column.x <= x and x + width <= column.x + column.width and free:
                self._labels.append(box)
                self._text(x, y, label, 8, tone=tone, halo=True)
                return

    def _axis(self, column: _Column, labelled: bool) -> None:
        bottom = self._y + ROW_HEIGHT
        step = nice_step((column.high - column.low) / column.unit_ns, 5 if column.width > 300 else 4)
        tick = -int(-column.low // (step * column.unit_ns)) * step
        while tick * column.unit_ns <= column.high:
            x = column.x + (tick * column.unit_ns - column.low) / (column.high - column.low) * column.width
            self._shapes.append(Line(x, self._y, x, bottom + 4, "soft", dashed=True))
            if labelled:
                self._text(x, bottom + 14, f"{tick:g}", 8, anchor="middle", tone="soft")
            tick += step
        if labelled:
            since = "step N began" if column is self._columns[0] else "step N ended"
            self._text(column.x + column.width / 2, bottom + 27, f"{column.unit} since {since}", 8.5, anchor="middle")


def _legend(drawing: Drawing, y: float) -> None:
    x = 14.0
    for name, style in STYLES.items():
        if not style.legend:
            continue
        width = 12 + 5 + text_width(style.legend, 8) + 10
        if x + width > WIDTH - 8:
            x, y = 14.0, y + 15
        drawing.shapes += [Rect(x, y - 8, 12, 10, name), Text(x + 17, y, style.legend, 8)]
        x += width


def _ms(nanoseconds: int) -> str:
    """Milliseconds with about three figures."""
    value = nanoseconds / 1e6
    return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
