"""What the conformance suite of attention backends found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.attention.base import SharedReadEnds
from jaxserve.core.forward_mode import ForwardMode

# What a declaration names, in words.
FENCES = {
    SharedReadEnds.PRE_REPLAY: "the marker of the prep program",
    SharedReadEnds.IN_REPLAY: "the marker",
    SharedReadEnds.POST_REPLAY: "the end record",
    SharedReadEnds.UNKNOWN: "the end record",
}


@dataclass(frozen=True)
class Violation:
    """One thing a backend does that its contract forbids.

    Attributes:
        check: ``"declaration"``, ``"attention"``, ``"prep"``, ``"pool"``, ``"purity"``, ``"delegation"`` or
            ``"reads_live"``.
        message: one sentence.
        mode: the step it happens in; None if it concerns none.
        declared: what the backend answered for the mode.
        table: the shared table read too late.
        late_ms: how long after its fence the table was still read, in milliseconds, under the suite's stalls; None if
            only the compiled program shows the read.
    """

    check: str
    message: str
    mode: ForwardMode | None = None
    declared: SharedReadEnds | None = None
    table: str | None = None
    late_ms: float | None = None


@dataclass(frozen=True)
class ConformanceReport:
    """Result of ``examine_backend``.

    Attributes:
        backend: its class.
        declared: mode -> what it answered, as the runner gets to hear it.
        violations: everything wrong; empty for a backend that conforms.
        notes: what its author may want to know.
        checks: one line for each check that was made.
    """

    backend: str
    declared: Mapping[ForwardMode, SharedReadEnds]
    violations: tuple[Violation, ...]
    notes: tuple[str, ...]
    checks: tuple[str, ...]

    @property
    def text(self) -> str:
        """Several lines to read: the verdict, what is wrong, what was declared and checked."""
        count = len(self.violations)
        verdict = f"{count} violation" + "s" * (count > 1) if count else "conforms"
        lines = [f"attention backend {self.backend}: {verdict}"]
        lines += [f"  VIOLATION {violation.message}" for violation in self.violations]
        lines += [f"  {mode.name} declares {ends.name}" for mode, ends in self.declared.items()]
        lines += [f"  checked: {check}" for check in self.checks]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


class ConformanceError(AssertionError):
    """A backend breaks its contract; the message is the report's text.

    Attributes:
        report: the whole report.
    """

    def __init__(self, report: ConformanceReport):
        super().__init__(report.text)
        self.report = report
