"""The write-after-read barrier: later row writes wait until the launched step has read the rows.

Applied right after a launch and before the previous step's results are processed, because processing writes rows too.
The order matters for a second reason: a wait binds to a record that was announced before it, so waiting ahead of the
launch would fence the previous one.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from jaxserve.attention.base import SharedReadEnds
from jaxserve.barrier.shared_rows import SharedRows
from jaxserve.runner.launch import Launch
from jaxserve.runner.model_runner import ModelRunner


class OwnsLastSharedRead(Protocol):
    """A worker, as far as the barrier is concerned."""

    @property
    def last_shared_read_runner(self) -> ModelRunner:
        """The runner whose mailbox counts."""
        ...


class WarBarrier:
    """Makes the schedule stream wait for the newest launch's reads.

    Attributes:
        counts: fences applied, by (kind, reason): ``("fine", "marker")``, ``("fine", "pre_replay")``,
            ``("fine", "post_replay")``, ``("coarse", "unknown")``, ``("coarse", "forced")``, ``("coarse", "cleared")``,
            ``("none", "disabled")``.
    """

    def __init__(self, rows: SharedRows, worker: OwnsLastSharedRead, *, force_coarse: bool, disabled: bool):
        self._rows = rows
        self._worker = worker
        self.force_coarse = force_coarse
        self.disabled = disabled
        self.counts: Counter[tuple[str, str]] = Counter()

    def apply(self, launch: Launch) -> None:
        """Fences every row write issued from now on behind the reads of ``launch``."""
        event = self._worker.last_shared_read_runner.take_shared_read_done_event()
        if self.disabled:
            self.counts["none", "disabled"] += 1
        elif event is not None and not self.force_coarse:
            self._rows.wait(event)
            self.counts["fine", _FINE_REASONS[launch.read_ends]] += 1
        else:
            self._rows.wait(launch.step_done)
            self.counts["coarse", self._coarse_reason(launch)] += 1

    def _coarse_reason(self, launch: Launch) -> str:
        if self.force_coarse:
            return "forced"
        return "unknown" if launch.read_ends is SharedReadEnds.UNKNOWN else "cleared"


_FINE_REASONS = {
    SharedReadEnds.PRE_REPLAY: "pre_replay",
    SharedReadEnds.IN_REPLAY: "marker",
    SharedReadEnds.POST_REPLAY: "post_replay",
    SharedReadEnds.UNKNOWN: "other_runner",
}
