"""Tokens stay right wherever a step is held: every backend, fence and schedule, under every stall.

The race check looks on. These are the programs that serve, without its notes, so it does not see what plain XLA code
reads; test_race_check.py runs those configurations with notes.
"""

from __future__ import annotations

import pytest
from harness import STALLS, make_engine, run, stalled

from jaxserve.barrier.race_check import RaceCheck
from jaxserve.engine.engine import Engine

CONFIGURATIONS = {
    "native": {},
    "native, page size 1": {"page_size": 1},
    "native, no overlap": {"disable_overlap_schedule": True},
    "native, coarse": {"force_coarse_war_barrier": True},
    "xla": {"attention_backend": "xla"},
    "xla, page size 16": {"attention_backend": "xla", "page_size": 16},
    "xla-live": {"attention_backend": "xla-live"},
    "planned": {"attention_backend": "planned"},
    "hybrid": {
        "attention_backend": "hybrid",
        "prefill_attention_backend": "planned",
        "decode_attention_backend": "xla-live",
    },
    "xla, no marker": {"attention_backend": "xla", "shared_read_marker": False},
    "xla-live, no marker": {"attention_backend": "xla-live", "shared_read_marker": False},
    "planned, no marker": {"attention_backend": "planned", "shared_read_marker": False},
    "upload": {"shared_updates": "upload"},
    "functional": {"shared_updates": "functional"},
}


@pytest.fixture(scope="module")
def check():
    following = RaceCheck()
    yield following
    following.check()
    following.close()


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=str)
def engine(request, check, tiny_model):
    built = make_engine(tiny_model, race_check=False, **CONFIGURATIONS[request.param])
    yield built
    built.close()


def test_tokens_equal_the_oracle_under_every_stall(engine: Engine, check: RaceCheck, right_tokens):
    for stall in STALLS:
        with stalled(stall):
            assert run(engine, stall) == right_tokens, f"wrong tokens under stall {stall!r}"
        check.check()


def test_a_stall_is_really_passed(engine: Engine):
    """A stall that nothing passes would make the test above prove nothing."""
    with stalled("late reads") as hits:
        run(engine)
        assert hits("snapshot.before_reads") + hits("copy.before_reads") > 20
