"""The conformance suite of attention backends: does a backend do what it declares?

    from jaxserve.testing import backend_conformance

    def test_my_backend():
        backend_conformance(MyBackend())

It launches the backend's real decode, verify and extend programs over a tiny model, overwrites one shared table after
the other as soon as the declaration allows it, with the reads stalled, and compares with the full-execution fence. It
also reads the compiled programs, because a late read that happens to change nothing is still one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.attention.base import AttentionBackend, SharedReadEnds
from jaxserve.attention.registry import as_registered, make_backend
from jaxserve.core.config import EngineConfig
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.program_arguments import STEP_DONATES
from jaxserve.runner.step_program import ProgramKey, RowSource, make_prep_program, make_step_program
from jaxserve.testing.conformance_attention import HEAD_DIM, check_attention
from jaxserve.testing.conformance_report import FENCES, ConformanceError, ConformanceReport, Violation
from jaxserve.testing.conformance_rig import MODES, Outcome, Rig, differ
from jaxserve.testing.program_report import SNAPSHOT, TABLES, ReadViolation, examine, fence_of, late_reads
from jaxserve.testing.step_programs import donated_parameters

PAGE_SIZES = (1, 4, 16)
STALL_MS = 2.0
TOLERANCE = 2e-5  # of attention in float32


def backend_conformance(backend: AttentionBackend | type[AttentionBackend] | str, **options: Any) -> ConformanceReport:
    """Checks an attention backend against its contract.

    Args:
        backend: an instance, a class without constructor arguments, or a registered name.
        options: as ``examine_backend`` takes them.

    Raises:
        ConformanceError: it breaks the contract; the message names mode, declaration, table and time.
        ConfigError: an unknown name, or an extension that is not built.
    """
    report = examine_backend(backend, **options)
    if report.violations:
        raise ConformanceError(report)
    return report


def examine_backend(
    backend: AttentionBackend | type[AttentionBackend] | str,
    *,
    modes: Sequence[ForwardMode] = MODES,
    page_sizes: Sequence[int] = PAGE_SIZES,
    dtype: Any = jnp.float32,
    tolerance: float = TOLERANCE,
    head_dim: int = HEAD_DIM,
) -> ConformanceReport:
    """As ``backend_conformance``, but returns what is wrong instead of raising it.

    Args:
        backend: as there. A class that declares nothing is examined as registration would take it: UNKNOWN everywhere.
        modes: steps to run, of DECODE, TARGET_VERIFY and EXTEND.
        page_sizes: tokens per page that attention is compared for.
        dtype: of weights, KV and queries.
        tolerance: largest difference from the XLA backend's attention.
        head_dim: of queries, keys and values.

    Raises:
        ConfigError: an unknown name, or an extension that is not built.
        ValueError: another mode.
    """
    if not set(modes) <= set(MODES):
        raise ValueError(f"modes must be of {', '.join(mode.name for mode in MODES)}, got {modes!r}")
    given = _instance(backend, dtype)
    suite = _Suite(given, as_registered(given), modes)
    suite.check_answers()
    rig = Rig(suite.backend, 4 if 4 in page_sizes else min(page_sizes), dtype, head_dim)
    try:
        suite.violations += check_attention(suite.backend, page_sizes, dtype, tolerance, modes, head_dim)
        suite.done("prep and attention against the XLA backend's", f"page sizes {', '.join(map(str, page_sizes))}")
        for mode in modes:
            suite.check_mode(rig, mode)
    finally:
        rig.close()
    suite.check_answers_again()
    return suite.report()


def _instance(backend: AttentionBackend | type[AttentionBackend] | str, dtype: Any) -> AttentionBackend:
    if isinstance(backend, str):
        return make_backend(EngineConfig(attention_backend=backend), jax.default_backend(), jnp.dtype(dtype).name)
    return backend() if isinstance(backend, type) else backend


class _Suite:
    """One examination."""

    def __init__(self, given: AttentionBackend, backend: AttentionBackend, modes: Sequence[ForwardMode]):
        self.backend = backend
        self.violations: list[Violation] = []
        self._modes = modes
        self._name = type(given).__name__
        self._notes: list[str] = []
        self._checks: list[str] = []
        self._answers: dict[ForwardMode, SharedReadEnds] = {}
        if backend is not given:
            self._notes.append("it does not override shared_read_ends, so it is not audited and answers UNKNOWN")

    def done(self, check: str, detail: str = "") -> None:
        self._checks.append(f"{check} ({detail})" if detail else check)

    def report(self) -> ConformanceReport:
        declared = {mode: self._answers[mode] for mode in self._modes}
        return ConformanceReport(self._name, declared, tuple(self.violations), tuple(self._notes), tuple(self._checks))

    # -- answers -----------------------------------------------------------------------------------------------------

    def check_answers(self) -> None:
        """``shared_read_ends`` answers every mode, always the same, and changes nothing."""
        before = dict(getattr(self.backend, "__dict__", {}))
        for mode in (*ForwardMode, *reversed(ForwardMode)):
            answer = self.backend.shared_read_ends(mode)
            if not isinstance(answer, SharedReadEnds):
                message = f"shared_read_ends({mode.name}) answers {answer!r}, no SharedReadEnds"
                raise ConformanceError(ConformanceReport(self._name, {}, (Violation("purity", message, mode),), (), ()))
            self._compare_answer(mode, answer)
        after = dict(getattr(self.backend, "__dict__", {}))
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) is not after.get(key))
        if changed:
            message = f"shared_read_ends changes the backend: {', '.join(changed)}"
            self.violations.append(Violation("purity", message))

    def check_answers_again(self) -> None:
        """The answers are still those of the start."""
        for mode in ForwardMode:
            self._compare_answer(mode, self.backend.shared_read_ends(mode))
        self.done("shared_read_ends is pure, and asked once per launch")

    def _compare_answer(self, mode: ForwardMode, answer: SharedReadEnds) -> None:
        first = self._answers.setdefault(mode, answer)
        if answer is not first and not any(v.check == "purity" for v in self.violations):
            message = f"{mode.name}: shared_read_ends answered {first.name}, then {answer.name}; it must be pure"
            self.violations.append(Violation("purity", message, mode, first))

    # -- one mode ----------------------------------------------------------------------------------------------------

    def check_mode(self, rig: Rig, mode: ForwardMode) -> None:
        """Runs a mode's program under poison and reads what was compiled for it."""
        ends = self._answers[mode]
        compiled_reads = self._check_compiled(rig, mode, ends)
        right = rig.coarse(mode)
        if right is None or differ(rig.coarse(mode, TABLES[1]), right):
            message = f"{mode.name}: a step fails or differs from itself even behind the full-execution fence"
            self.violations.append(Violation("attention", message, mode, ends))
            return
        if rig.watched.asked != [mode]:
            message = f"{mode.name}: a launch asked shared_read_ends {len(rig.watched.asked)} times, wanted once"
            self.violations.append(Violation("purity", message, mode, ends))
        for table in TABLES:
            changed = not rig.is_synchronous and differ(rig.poisoned(mode, table), right)
            late_ms = _late_ms(rig, mode, table, right) if changed else None
            uses = [read.use for read in compiled_reads if read.table == table]
            if changed or uses:
                self.violations.append(_late_read(mode, ends, table, changed, late_ms, uses))
        how = "in the compiled program"
        if not rig.is_synchronous:
            how = f"under poison and stalls of {STALL_MS} ms before each layer, and {how}"
        self.done(f"{mode.name}: where shared rows are read, {how}", ", ".join(TABLES))
        if rig.is_synchronous:
            self._notes.append(f"{mode.name} runs on the calling thread: its tables could not be overwritten meanwhile")

    def _check_compiled(self, rig: Rig, mode: ForwardMode, ends: SharedReadEnds) -> list[ReadViolation]:
        keys = [key for key in rig.steps.program_keys()[0] if key.shape.mode is mode and not key.is_greedy]
        key = max(keys, key=lambda key: key.shape.batch)
        with _attending(self.backend) as served:
            text, donated = self._compile_step(rig, key)
        self._check_delegation(mode, ends, served)
        fence = fence_of(key.source, ends, is_prep=False, has_marker=True)
        report = examine(mode.name, text, fence, ends, donated=donated, pool_shape=rig.kv.shape)
        self.violations += [Violation("pool", f"{mode.name}: {fault}", mode, ends) for fault in report.faults]
        found = list(report.late_reads)
        if key.source is RowSource.PRIVATE:
            prep_key = rig.steps._prep_key(key.shape)
            prep = make_prep_program(prep_key, self.backend)
            _, arguments = rig.steps.preps.traceable(prep_key)
            text_of_prep = jax.jit(prep, keep_unused=True).lower(*arguments).compile().as_text() or ""
            found += late_reads(text_of_prep, SNAPSHOT)
        live = late_reads(text, None if key.source is RowSource.PRIVATE else SNAPSHOT)
        if live and not found and not self.backend.reads_live:
            tables = ", ".join(f"`{table}`" for table in dict.fromkeys(read.table for read in live))
            message = f"{mode.name}: reads {tables} through step.live, but reads_live is False"
            self.violations.append(Violation("reads_live", message, mode, ends))
        if ends is SharedReadEnds.UNKNOWN and not live:
            self._notes.append(
                f"{mode.name} is UNKNOWN but reads nothing shared after the marker: IN_REPLAY would hold"
            )
        return found

    def _compile_step(self, rig: Rig, key: ProgramKey) -> tuple[str, dict[str, int]]:
        """The program as it serves: without the suite's hold points and wrapping."""
        model = rig.model
        step = make_step_program(key, self.backend, model.bind, model.config.attention_windows)
        _, arguments = rig.steps.steps.traceable(key)
        jitted = jax.jit(step, donate_argnums=STEP_DONATES, keep_unused=True)
        text = jitted.lower(*arguments).compile().as_text() or ""
        return text, donated_parameters(len(model.leaves))

    def _check_delegation(self, mode: ForwardMode, ends: SharedReadEnds, served: dict[str, AttentionBackend]) -> None:
        for attribute, child in served.items():
            answer = child.shared_read_ends(mode)
            if answer > ends:
                message = (
                    f"{mode.name}: declares {ends.name}, but {attribute} ({child.name}), which serves the mode, "
                    f"declares {answer.name}; a composite declares SharedReadEnds.max_of its parts"
                )
                self.violations.append(Violation("delegation", message, mode, ends))
        if served:
            self.done(f"{mode.name}: not earlier than {', '.join(served)}")


def _late_ms(rig: Rig, mode: ForwardMode, table: str, right: Outcome) -> float | None:
    """How late a table is read; a machine too busy to overwrite it in time needs longer stalls."""
    measured = (rig.late_ms(mode, table, right, STALL_MS * factor) for factor in (1, 4, 16))
    return next((late_ms for late_ms in measured if late_ms is not None), None)


def _late_read(mode: ForwardMode, ends: SharedReadEnds, table: str, changed: bool, late_ms: float | None,
               uses: list[str]) -> Violation:  # fmt: skip
    fence = FENCES[ends]
    if changed:
        when = f"{late_ms:.1f} ms after" if late_ms else "after"
        message = f"{mode.name}: declared {ends.name}, still read `{table}` {when} {fence}"
    else:
        message = f"{mode.name}: declared {ends.name}, but nothing ends a read of `{table}` before {fence}"
    if uses:
        more = f" and {len(uses) - 1} more" if len(uses) > 1 else ""
        message += f" (compiled: {uses[0]}{more})"
    return Violation("declaration", message, mode, ends, table, late_ms)


@contextlib.contextmanager
def _attending(backend: AttentionBackend) -> Iterator[dict[str, AttentionBackend]]:
    """Yields the children of a composite that come to attend while a program is traced inside, by attribute name."""
    served: dict[str, AttentionBackend] = {}
    children = {name: v for name, v in getattr(backend, "__dict__", {}).items() if isinstance(v, AttentionBackend)}

    def spy(name: str, child: AttentionBackend) -> Any:
        attend = child.attend

        def spied(*arguments: Any) -> Any:
            served[name] = child
            return attend(*arguments)

        return spied

    with contextlib.ExitStack() as undo:
        for name, child in children.items():
            if "attend" not in vars(child):
                child.attend = spy(name, child)  # type: ignore[method-assign]
                undo.callback(vars(child).pop, "attend")
        yield served
