"""What a compiled program proves: where its reads of shared rows end, what it donates, what it copies.

One verdict for ``jaxserve check-programs`` and for the conformance suite of attention backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.attention.base import SharedReadEnds
from jaxserve.barrier.shared_rows import RowLayout
from jaxserve.runner.step_program import DraftForm, DraftRows, RowSource
from jaxserve.testing.hlo_text import parse_module
from jaxserve.testing.scheduled_hlo import reads_of, uses_after
from jaxserve.testing.step_programs import aliased_outputs, copies_of_shape
from jaxserve.testing.thunk_sequence import GraphUse

TABLES = tuple(RowLayout(1, 1, num_drafts=1).shapes())  # names, in the order programs take them
DRAFT_TABLES = TABLES[-2:]  # there with speculation only
SNAPSHOT, END = "jaxserve_snapshot", "jaxserve_record_end"


@dataclass(frozen=True)
class ReadViolation:
    """A use of a shared table that the program's fence does not cover.

    Attributes:
        table: its name in ``RowLayout.shapes``.
        use: which instruction reads it, and why that is too late.
    """

    table: str
    use: str


@dataclass(frozen=True)
class ProgramReport:
    """What is proven of one program.

    Attributes:
        name: ``step decode[batch=8,tokens=1,width=16]``.
        ends: where its reads of shared rows are taken to end, as the runner resolved it; None: it reads none.
        marker: custom call the fence is recorded by; ``""``: the program reads nothing shared, or has no marker.
        late_reads: uses of shared rows behind the fence.
        faults: everything else that is wrong with it.
        donated: donated arguments whose memory an output takes over, of those that should be.
        pool_copies: instructions that copy a whole KV pool.
        instructions: in the entry computation.
        seconds: compile time.
        graphs: division into CUDA graphs; None off CUDA.
    """

    name: str
    ends: SharedReadEnds | None
    marker: str
    late_reads: tuple[ReadViolation, ...]
    faults: tuple[str, ...]
    donated: tuple[str, ...]
    pool_copies: int
    instructions: int
    seconds: float = 0.0
    graphs: GraphUse | None = field(default=None)

    @property
    def violations(self) -> tuple[str, ...]:
        """All that is wrong, one line each."""
        return (*(f"{v.table}: {v.use}" for v in self.late_reads), *self.faults)


def fence_of(source: RowSource, ends: SharedReadEnds | None, *, is_prep: bool, has_marker: bool) -> str | None:
    """The custom call behind which a program may not read shared rows; None: it may read none at all.

    ``""``: no marker, the host waits for the whole execution.
    """
    if not has_marker:
        return None if source in (RowSource.PRIVATE, RowSource.HANDED) and not is_prep else ""
    if is_prep:
        return SNAPSHOT
    if source in (RowSource.PRIVATE, RowSource.HANDED):
        return None
    return SNAPSHOT if ends is SharedReadEnds.IN_REPLAY else END


def late_reads(hlo_text: str, fence: str | None, drafts: DraftForm | None = None) -> list[ReadViolation]:
    """Uses of shared tables behind ``fence`` (see ``fence_of``), each with the table's name.

    Drafts that are read live have the full-execution fence, whatever the other rows have.

    Raises:
        ValueError: the text is not scheduled, or the fence is missing from it.
    """
    found = []
    for number, table in enumerate(TABLES):
        name = [f"tables[{number}]"]
        if table in DRAFT_TABLES and name[0] not in hlo_text:
            continue
        is_live = table in DRAFT_TABLES and drafts is not None and drafts.rows is DraftRows.LIVE
        table_fence = END if is_live and fence != "" else fence
        if table_fence is None:
            uses = reads_of(hlo_text, name)
        elif table_fence:
            uses = uses_after(hlo_text, name, table_fence, concurrent=True)
        else:
            uses = []
        found += [ReadViolation(table, use) for use in uses]
    return found


def examine(
    name: str,
    hlo_text: str,
    fence: str | None,
    ends: SharedReadEnds | None,
    *,
    donated: dict[str, int],
    pool_shape: Sequence[int] | None,
    drafts: DraftForm | None = None,
    seconds: float = 0.0,
    graphs: GraphUse | None = None,
) -> ProgramReport:
    """Reads a compiled program.

    Args:
        name: for the report.
        hlo_text: ``compiled.as_text()``.
        fence: see ``fence_of``.
        ends: where its reads are taken to end; None: it has none.
        donated: argument name -> parameter number of what must be taken over by an output.
        pool_shape: shape no instruction may copy; None for a program without a pool.
        drafts: how a verify program reads its drafts.
        seconds: compile time.
        graphs: division into CUDA graphs.
    """
    faults: list[str] = []
    reads: list[ReadViolation] = []
    try:
        reads = late_reads(hlo_text, fence, drafts)
    except ValueError as error:
        faults.append(str(error))
    aliased = set(aliased_outputs(hlo_text))
    faults += [f"{what} is donated, but no output takes its memory" for what, n in donated.items() if n not in aliased]
    copies = copies_of_shape(hlo_text, tuple(pool_shape)) if pool_shape is not None else []
    faults += [f"copies the KV pool: {copy[:100]}" for copy in copies]
    return ProgramReport(
        name, ends, fence or "", tuple(reads), tuple(faults), tuple(w for w, n in donated.items() if n in aliased),
        len(copies), len(parse_module(hlo_text).entry.instructions), seconds, graphs,
    )  # fmt: skip
