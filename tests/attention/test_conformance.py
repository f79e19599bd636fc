"""The conformance suite passes every built-in backend, and catches every liar by name."""

from __future__ import annotations

import liars
import pytest

from jaxserve.attention.base import SharedReadEnds
from jaxserve.attention.hybrid import HybridBackend
from jaxserve.attention.native import NativeBackend
from jaxserve.attention.xla import PlannedBackend, XlaBackend, XlaLiveBackend
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.testing import ConformanceError, backend_conformance, examine_backend

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
MODES = [pytest.param(mode, id=mode.name.lower()) for mode in (DECODE, VERIFY, EXTEND)]


def caught(liar, mode: ForwardMode = DECODE) -> ConformanceError:
    with pytest.raises(ConformanceError) as raised:
        backend_conformance(liar, modes=[mode], page_sizes=[4])
    return raised.value


def declarations(error: ConformanceError) -> dict:
    return {v.table: v for v in error.report.violations if v.check == "declaration"}


@pytest.mark.parametrize(
    "backend",
    [
        NativeBackend(),
        XlaBackend(),
        XlaLiveBackend(),
        PlannedBackend(),
        HybridBackend(PlannedBackend(), NativeBackend(), sliding=XlaLiveBackend()),
    ],
    ids=lambda backend: backend.name,
)
def test_built_in_backends_conform(backend):
    report = backend_conformance(backend, page_sizes=[4] if backend.name == "hybrid" else [1, 4, 16])
    assert report.violations == ()
    assert list(report.declared) == [DECODE, VERIFY, EXTEND]
    assert "conforms" in report.text


def test_a_backend_is_found_by_name():
    report = backend_conformance("planned", modes=[DECODE], page_sizes=[4])
    assert report.declared == {DECODE: SharedReadEnds.PRE_REPLAY}


@pytest.mark.parametrize("mode", MODES)
def test_in_replay_with_live_reads_is_caught(mode):
    error = caught(liars.InWhileLive, mode)
    found = declarations(error)
    assert set(found) == {"block_tables", "lengths"}
    assert all(violation.late_ms > 0 for violation in found.values())
    assert f"{mode.name}: declared IN_REPLAY, still read `block_tables` " in str(error)
    assert " ms after the marker (compiled: " in str(error)


@pytest.mark.parametrize("mode", MODES)
def test_pre_replay_with_live_reads_is_caught(mode):
    error = caught(liars.PreWhileLive, mode)
    assert set(declarations(error)) == {"block_tables", "lengths"}
    assert f"{mode.name}: declared PRE_REPLAY, still read `lengths` " in str(error)
    assert " ms after the marker of the prep program" in str(error)


def test_the_one_table_read_late_is_the_one_named():
    found = declarations(caught(liars.LengthsLive))
    assert set(found) == {"lengths"}
    assert found["lengths"].late_ms > 0


def test_one_layer_that_reads_live_is_enough():
    found = declarations(caught(liars.TablesLiveInWindowedLayers))
    assert set(found) == {"block_tables"}
    # The first layer is honest, and was stalled too.
    assert found["block_tables"].late_ms > 2.0


def test_a_read_that_the_end_record_does_not_wait_for_is_caught():
    """It changes no result, so only the compiled program shows it."""
    error = caught(liars.ReadsBesideTheEnd)
    found = declarations(error)
    assert set(found) == {"block_tables"}
    assert found["block_tables"].late_ms is None
    assert "declared POST_REPLAY, but nothing ends a read of `block_tables` before the end record" in str(error)


@pytest.mark.parametrize(
    ("liar", "mode", "check", "message"),
    [
        (liars.IgnoresWindows, DECODE, "attention", "window 7: attention is off by "),
        (liars.IgnoresTrees, VERIFY, "attention", "TARGET_VERIFY of a tree"),
        (liars.IgnoresSinks, EXTEND, "attention", "EXTEND with sinks"),
        (liars.WritesPadding, EXTEND, "prep", "padding tokens write to a page other than the null page"),
        (liars.WritesThePool, DECODE, "pool", "DECODE: copies the KV pool"),
        (liars.HidesLiveReads, DECODE, "reads_live", "through step.live, but reads_live is False"),
        (liars.Moody, DECODE, "purity", "it must be pure"),
        (liars.ForgetsItsParts, DECODE, "delegation", "but sliding (xla-live), which serves the mode, declares POST"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "name", None),
)
def test_other_breaches_are_caught(liar, mode, check, message):
    error = caught(liar, mode)
    assert check in {violation.check for violation in error.report.violations}
    assert message in str(error)


def test_an_answer_that_is_no_read_end_is_caught():
    class Words(XlaBackend):
        def shared_read_ends(self, forward_mode):
            return "in"

    assert "answers 'in', no SharedReadEnds" in str(caught(Words))


def test_a_backend_that_declares_nothing_is_examined_as_unaudited():
    report = examine_backend(liars.DeclaresNothing, modes=[VERIFY], page_sizes=[4])
    assert report.declared == {VERIFY: SharedReadEnds.UNKNOWN}
    assert report.violations == ()
    assert "IN_REPLAY would hold" in report.text
