"""Who says where reads of shared rows end, and what the runner makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from jaxserve.attention.base import AttentionBackend, SharedReadEnds
from jaxserve.attention.hybrid import HybridBackend
from jaxserve.attention.native import NativeBackend
from jaxserve.attention.registry import _registered, make_backend, register_attention_backend
from jaxserve.attention.xla import PlannedBackend, XlaBackend, XlaLiveBackend
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.demotions import Demotions
from jaxserve.runner.step_program import RowSource
from jaxserve.runner.step_runner import StepRunner

PRE, IN, POST, UNKNOWN = SharedReadEnds
DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND


def step_runner(backend, *, has_marker: bool, unsound: bool = False) -> StepRunner:
    """A step runner as far as resolving goes, without a model."""
    runner = object.__new__(StepRunner)
    runner.backend = backend
    runner.demotions = Demotions()
    runner.runner = SimpleNamespace(has_marker=has_marker, config=SimpleNamespace(compat_unsound_fallback=unsound))
    return runner


def declaring(ends: SharedReadEnds, *, reads_live: bool = False) -> Mock:
    backend = Mock(shared_read_ends=Mock(return_value=ends), reads_live=reads_live)
    backend.name = "declaring"
    return backend


@pytest.mark.parametrize(
    ("declared", "has_marker", "reads_live", "expected"),
    [
        (PRE, True, False, PRE),
        (PRE, False, False, PRE),
        (IN, True, False, IN),
        (IN, False, False, PRE),  # made true: prep becomes a program of its own
        (IN, False, True, POST),  # nothing to hoist
        (POST, True, True, POST),
        (POST, False, True, POST),
        (UNKNOWN, True, False, UNKNOWN),
        (UNKNOWN, False, False, UNKNOWN),
    ],
)
@pytest.mark.parametrize("mode", [DECODE, VERIFY, EXTEND])
def test_resolve_shared_read_ends(declared, has_marker, reads_live, expected, mode):
    """Only the declaration and the marker count: no gate on the mode, and the backend is asked exactly once."""
    backend = declaring(declared, reads_live=reads_live)
    runner = step_runner(backend, has_marker=has_marker)
    assert runner._resolve_shared_read_ends(mode) is expected
    backend.shared_read_ends.assert_called_once_with(mode)


def test_a_hoisted_prep_is_really_hoisted():
    """PRE_REPLAY is only true if the step program gets its rows from a program launched before it."""
    runner = step_runner(declaring(IN), has_marker=False)
    assert runner._row_source(runner._resolve_shared_read_ends(DECODE)) is RowSource.PRIVATE


def test_the_unsound_fallback_publishes_before_reads_that_stay_inside():
    """What the original does; behind a flag, for experiments."""
    runner = step_runner(declaring(IN), has_marker=False, unsound=True)
    ends = runner._resolve_shared_read_ends(DECODE)
    assert ends is PRE
    assert runner._row_source(ends) is RowSource.COPY


def test_a_missing_marker_is_logged_once(caplog):
    runner = step_runner(declaring(IN), has_marker=False)
    for _ in range(3):
        runner._resolve_shared_read_ends(DECODE)
    assert sum("marker" in record.message for record in caplog.records) == 1


def test_ends_are_ordered_by_lateness():
    assert sorted([UNKNOWN, IN, POST, PRE]) == [PRE, IN, POST, UNKNOWN]
    assert SharedReadEnds.max_of([PRE, POST, IN]) is POST
    assert SharedReadEnds.max_of([POST, UNKNOWN]) is UNKNOWN
    with pytest.raises(ValueError):
        SharedReadEnds.max_of([])


@pytest.mark.parametrize(
    ("backend", "decode", "verify", "extend"),
    [
        (AttentionBackend(), IN, IN, UNKNOWN),
        (XlaBackend(), IN, IN, UNKNOWN),
        (NativeBackend(), IN, IN, UNKNOWN),
        (XlaLiveBackend(), POST, POST, UNKNOWN),
        (PlannedBackend(), PRE, PRE, PRE),
        (HybridBackend(prefill=PlannedBackend(), decode=XlaLiveBackend()), POST, POST, PRE),
        (HybridBackend(prefill=XlaBackend(), decode=PlannedBackend()), PRE, PRE, UNKNOWN),
        (HybridBackend(PlannedBackend(), PlannedBackend(), sliding=XlaBackend()), IN, IN, UNKNOWN),
    ],
    ids=lambda value: getattr(value, "name", None) or None,
)
def test_declarations(backend, decode, verify, extend):
    assert backend.shared_read_ends(DECODE) is decode
    assert backend.shared_read_ends(VERIFY) is verify
    assert backend.shared_read_ends(EXTEND) is extend


def test_an_outside_backend_that_declares_nothing_is_unknown(monkeypatch):
    """What was audited for the built-in backends says nothing of somebody's own, whichever of them it derives from."""

    class Outside(XlaBackend):
        pass

    class OutsidePlanned(PlannedBackend):  # may read live rows in an attend of its own
        pass

    class Audited(XlaBackend):
        def shared_read_ends(self, forward_mode):
            return IN

    class DerivedFromAudited(Audited):
        pass

    classes = ((Outside, UNKNOWN), (OutsidePlanned, UNKNOWN), (Audited, IN), (DerivedFromAudited, IN))
    for name, (cls, expected) in enumerate(classes):
        name = f"outside-{name}"
        register_attention_backend(name, cls)
        factory = _registered.pop(name)
        monkeypatch.setitem(_registered, name, factory)
        chosen = make_backend(EngineConfig(attention_backend=name), "cpu", "float32")
        assert chosen.shared_read_ends(DECODE) is expected


def test_bad_backends_are_refused():
    with pytest.raises(ConfigError, match="already registered"):
        register_attention_backend("xla", XlaBackend)
    with pytest.raises(ConfigError, match="subclass of AttentionBackend"):
        register_attention_backend("mine", object)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must define attend\(\)"):
        register_attention_backend("mine", AttentionBackend)
    with pytest.raises(ConfigError, match="known are auto, xla, xla-live, planned, native, paged-cuda, hybrid"):
        make_backend(EngineConfig(attention_backend="flash"), "cpu", "float32")
    with pytest.raises(ConfigError, match="float32 on the CPU"):
        make_backend(EngineConfig(attention_backend="native"), "cpu", "bfloat16")
    with pytest.raises(ConfigError, match="need --attention-backend hybrid"):
        make_backend(EngineConfig(decode_attention_backend="xla"), "cpu", "float32")


def test_a_declared_pre_replay_is_hoisted_even_in_unsound_mode():
    """The flag reproduces one wrong demotion, no more: an honest PRE_REPLAY keeps its own program."""
    runner = step_runner(declaring(PRE), has_marker=True, unsound=True)
    assert runner._row_source(runner._resolve_shared_read_ends(DECODE)) is RowSource.PRIVATE
