"""How each fault of ``verification/mutants.txt`` is put into the real engine.

The list there is the only one: its ``engine`` field names a function here, ``stall`` the stall under which the fault
makes tokens wrong. A function changes classes through ``monkeypatch`` and returns the engine settings the fault needs.
It is caught three times: by wrong tokens (test_mutants.py), by the race check without a stall (test_race_check.py), and
by the model (make verify).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from drafters import LiveProphet, Prophet
from harness import workload

from jaxserve.attention.base import SharedReadEnds
from jaxserve.attention.registry import _registered
from jaxserve.attention.xla import XlaLiveBackend
from jaxserve.barrier.channel import FenceChannel
from jaxserve.barrier.native import native_module
from jaxserve.barrier.shared_rows import SharedRows
from jaxserve.engine.engine import Engine
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.worker import TargetWorker
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.war_barrier import WarBarrier
from jaxserve.speculative import registry
from jaxserve.speculative.ngram import NgramWorker
from jaxserve.testing.poison import Poison

VERIFICATION = Path(__file__).parents[2] / "verification"

# Mutants whose wrong rows may be so wrong that something refuses them, and how it says so: the snapshot; or the
# sampler, when a sampling row that nobody has written divides by a penalty of 0.
LOUD = {
    "staging_rewritten_early": r"row id \d+ at position \d+ is outside a table",
    # Or steps run so far ahead of their writes that the ring of their events is full.
    "writes_not_awaited": r"logits that are not numbers|step_done\.reserve failed: generation \d+ is still awaited",
}


def listed() -> list[Any]:
    """The blocks of mutants.txt, read by the code that checks the model."""
    name = "verification_run"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, VERIFICATION / "run.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].read_mutants()


def in_engine() -> list[Any]:
    """Those of them that are put into the engine."""
    return [mutant for mutant in listed() if mutant.engine != "none"]


def inject(mutant: Any, monkeypatch: Any, right_tokens: list[list[int]]) -> dict[str, Any]:
    """Puts a listed fault into the engine; returns the settings it needs.

    Args:
        right_tokens: outputs of the workload, for algorithms that draft them.
    """
    answers = [prompt + output for (prompt, _), output in zip(workload(), right_tokens, strict=True)]
    monkeypatch.setattr(Prophet, "answers", answers)
    return FAULTS[mutant.engine](monkeypatch)


def no_barrier(monkeypatch):
    monkeypatch.setattr(WarBarrier, "apply", lambda self, launch: None)
    return {}


def old_event(monkeypatch):
    """The barrier takes the event of the launch before."""
    take = ModelRunner.take_shared_read_done_event

    def take_previous(self):
        event = take(self)
        previous, self.previous_event = getattr(self, "previous_event", event), event
        return previous

    monkeypatch.setattr(ModelRunner, "take_shared_read_done_event", take_previous)
    return {}


def published_early(monkeypatch):
    """The read-done record is made when the step is launched instead of when its reads end."""
    ticket = FenceChannel.ticket

    def record_first(self, *, marker=None, **fields):
        if marker is not None:
            marker.record()
        return ticket(self, marker=None, **fields)

    monkeypatch.setattr(FenceChannel, "ticket", record_first)
    return {}


def pre_while_reading_live(monkeypatch):
    class Liar(XlaLiveBackend):
        def shared_read_ends(self, forward_mode):
            return SharedReadEnds.PRE_REPLAY

    monkeypatch.setitem(_registered, "liar", Liar)
    return {"attention_backend": "liar"}


def unsound_fallback(monkeypatch):
    """The original's answer to a missing marker: publish before the replay although the reads are inside it."""
    return {
        "attention_backend": "xla",
        "shared_read_marker": False,
        "compat_unsound_fallback": True,
        "allow_unsafe": True,
    }


def slot_recycled_early(monkeypatch):
    """Slots of sequences in their last step are released before that step is fenced."""

    def launch(self, batch):
        wants_logprobs = any(s.request.params.logprobs is not None for s in batch.owners)
        launched = self.worker.execute(batch, self.rows.publish(), wants_logprobs)
        self._retire(batch.owners)
        self._apply_war_barrier(launched)
        return launched

    monkeypatch.setattr(Scheduler, "launch", launch)
    return {}


def staging_rewritten_early(monkeypatch):
    native = native_module("cpu")

    def make(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.stream = native.Stream(1, 4096, 10.0, staging_guarded=False, name="schedule stream")

    build = SharedRows.__init__
    monkeypatch.setattr(SharedRows, "__init__", make)
    return {}


def writes_not_awaited(monkeypatch):
    """The read-after-write side: a step does not wait for its row writes."""
    ticket = FenceChannel.ticket
    monkeypatch.setattr(FenceChannel, "ticket", lambda self, **fields: ticket(self, **{**fields, "write_done": 0}))
    return {}


def stale_mailbox(monkeypatch):
    """Nobody clears the mailbox, so a phase that publishes nothing leaves the event of an older one."""
    monkeypatch.setattr(
        ModelRunner,
        "shared_read_done_event",
        property(
            lambda self: self.__dict__.get("mailbox"),
            lambda self, event: self.__dict__.__setitem__("mailbox", event or self.__dict__.get("mailbox")),
        ),
        raising=False,
    )
    return {}


def ngram_clear_deleted(monkeypatch):
    """NGRAM's worker leaves the event of the marker in the mailbox, although verify reads drafts behind it.

    The scheduler of today writes no draft row while a verify step runs. So here it is one that writes every row as soon
    as the barrier lets it.
    """

    def make(self, *args, **kwargs):
        build(self, *args, **kwargs)
        Poison(self, LiveProphet.future_of)

    build = Engine.__init__
    monkeypatch.setattr(Engine, "__init__", make)
    monkeypatch.setattr(NgramWorker, "execute", TargetWorker.execute)
    monkeypatch.setitem(registry._registered, LiveProphet.name, LiveProphet)
    return {"speculative_algorithm": LiveProphet.name, "speculative_adaptive": False}


FAULTS = {
    fault.__name__: fault
    for fault in (
        no_barrier,
        old_event,
        published_early,
        pre_while_reading_live,
        unsound_fallback,
        slot_recycled_early,
        staging_rewritten_early,
        writes_not_awaited,
        stale_mailbox,
        ngram_clear_deleted,
    )
}
