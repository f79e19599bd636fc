"""Each way of breaking the barrier makes tokens wrong under some stall.

A mutant that survives means that the stall tests cannot see the fault it stands for.
"""

from __future__ import annotations

import re

import pytest
from harness import make_engine, run, stalled

from jaxserve.attention.base import SharedReadEnds
from jaxserve.attention.registry import _registered, register_attention_backend
from jaxserve.attention.xla import XlaLiveBackend
from jaxserve.barrier.channel import FenceChannel
from jaxserve.barrier.native import native_module
from jaxserve.barrier.shared_rows import SharedRows
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.war_barrier import WarBarrier


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

    register_attention_backend("liar", Liar)
    monkeypatch.delitem(_registered, "liar", raising=True)
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
        self.stream = native.Stream(1, 4096, 10.0, staging_guarded=False)

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


MUTANTS = {
    no_barrier: "late reads",
    old_event: "late reads",
    published_early: "late reads",
    pre_while_reading_live: "late layer reads",
    unsound_fallback: "late reads",
    slot_recycled_early: "late reads",
    staging_rewritten_early: "late row writes",
    writes_not_awaited: "late row writes",
    stale_mailbox: "late reads",
}

# Mutants whose wrong rows are so wrong that the snapshot refuses them, and how it says so.
LOUD = {staging_rewritten_early: r"row id \d+ at position \d+ is outside a table"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant, monkeypatch, tiny_model, right_tokens):
    engine = make_engine(tiny_model, **mutant(monkeypatch))
    try:
        with stalled(MUTANTS[mutant]):
            try:
                caught = any(run(engine, f"try{i}") != right_tokens for i in range(3))
            except RuntimeError as error:
                # Only wrong tokens count, or the error named here: any other would prove nothing about the fence.
                if not re.search(LOUD.get(mutant, "no error is expected"), str(error)):
                    raise
                caught = True
        assert caught, f"{mutant.__name__} gave the right tokens under {MUTANTS[mutant]!r}"
    finally:
        monkeypatch.undo()
        engine.close()
