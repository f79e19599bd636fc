"""The write-after-read barrier: later row writes wait until the launched step has read the rows.

Applied right after a launch and before the previous step's results are processed, because processing writes rows too.
The order matters for a second reason: a wait binds to a record that was announced before it, so waiting ahead of the
launch would fence the previous one.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Protocol

from jaxserve.attention.base import SharedReadEnds
from jaxserve.barrier.shared_rows import SharedRows
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.launch import Launch
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.timeline.recorder import span


class OwnsLastSharedRead(Protocol):
    """A worker, as far as the barrier is concerned."""

    @property
    def last_shared_read_runner(self) -> ModelRunner:
        """The runner whose mailbox counts."""
        ...


class Fence(NamedTuple):
    """What guards the rows after a launch, and why that.

    | kind | reason | |
    |---|---|---|
    | fine | marker | waits for the marker inside the program |
    | fine | pre_replay | reads ended before the program that computes the step |
    | fine | post_replay | reads end with that program, says the backend |
    | fine | other_runner | the event is of a runner other than the one that computed the step |
    | coarse | forced | ``--force-coarse-war-barrier`` |
    | coarse | extend | the backend says UNKNOWN of prefill, as most do |
    | coarse | unknown | the backend says UNKNOWN of another mode: it has not been audited |
    | coarse | (a word) | the worker cleared the mailbox and gave that ``Launch.coarse_reason`` (``ngram``) |
    | coarse | cleared | somebody cleared the mailbox and did not say why |
    | none | disabled | ``--disable-war-barrier`` |
    """

    kind: str
    reason: str


class WarBarrier:
    """Makes the schedule stream wait for the newest launch's reads.

    Attributes:
        counts: fences applied, by kind and reason.
    """

    def __init__(self, rows: SharedRows, worker: OwnsLastSharedRead, *, force_coarse: bool, disabled: bool):
        self._rows = rows
        self._worker = worker
        self.force_coarse = force_coarse
        self.disabled = disabled
        self.counts: Counter[Fence] = Counter()

    def apply(self, launch: Launch) -> None:
        """Fences every row write issued from now on behind the reads of ``launch``."""
        with span("barrier", step=launch.batch.step_number) as applied:
            event = self._worker.last_shared_read_runner.take_shared_read_done_event()
            fence = fence_for(
                launch.read_ends, launch.batch.mode, force_coarse=self.force_coarse, disabled=self.disabled,
                published=event is not None, coarse_reason=launch.coarse_reason,
            )  # fmt: skip
            if fence.kind != "none":
                awaited = launch.step_done if fence.kind == "coarse" else event
                assert awaited is not None
                self._rows.wait(awaited, fence.kind)
                applied.note(ring=awaited.ring.name, generation=awaited.generation)
            applied.note(kind=fence.kind, reason=fence.reason)
            self.counts[fence] += 1


def fence_for(
    ends: SharedReadEnds,
    mode: ForwardMode,
    *,
    force_coarse: bool,
    disabled: bool,
    published: bool | None = None,
    coarse_reason: str | None = None,
) -> Fence:
    """The fence of a launch.

    Args:
        ends: where its reads end, as resolved.
        mode: what the step does.
        force_coarse, disabled: the barrier's switches.
        published: whether the mailbox held an event; by default as ``ends`` promises.
        coarse_reason: see ``Launch``.
    """
    if published is None:
        published = ends is not SharedReadEnds.UNKNOWN
    if disabled:
        return Fence("none", "disabled")
    if force_coarse:
        return Fence("coarse", "forced")
    if published:
        return Fence("fine", _FINE_REASONS[ends])
    if coarse_reason is not None:
        return Fence("coarse", coarse_reason)
    if ends is SharedReadEnds.UNKNOWN:
        return Fence("coarse", "extend" if mode is ForwardMode.EXTEND else "unknown")
    return Fence("coarse", "cleared")


_FINE_REASONS = {
    SharedReadEnds.PRE_REPLAY: "pre_replay",
    SharedReadEnds.IN_REPLAY: "marker",
    SharedReadEnds.POST_REPLAY: "post_replay",
    SharedReadEnds.UNKNOWN: "other_runner",
}
