"""Chunks of prompts are as long as those who decode can wait."""

from __future__ import annotations

import pytest
from rig import add, greedy, make_engine, prompt_of, run

from jaxserve.scheduler.chunk_sizes import ChunkSizes

SIZES = (16, 32, 64, 128)


def measured(longest_s: float, **seconds: float) -> ChunkSizes:
    """``seconds`` like s16=0.1; each twice, for the first is not believed."""
    chunks = ChunkSizes(SIZES, longest_s)
    for name, value in seconds.items():
        chunks.took(int(name[1:]), 99.0)
        chunks.took(int(name[1:]), value)
    return chunks


@pytest.mark.parametrize(
    ("chunks", "wanted"),
    [
        (measured(0.1), 128),  # nothing known
        (measured(0.1, s128=0.1), 128),
        (measured(0.1, s128=0.15), 64),  # taken for 0.075
        (measured(0.1, s128=0.15, s64=0.12), 32),  # and found to be more
        (measured(0.1, s16=0.02), 64),
        (measured(0.1, s16=0.02, s128=0.09), 128),
        (measured(0.1, s16=0.5, s128=0.6), 128),  # no size is quick enough: smaller ones would gain little
        (measured(0.1, s16=0.1, s32=0.12, s64=0.2, s128=0.4), 32),
        (measured(0.1, s16=0.01, s128=9.0), 128),  # slow by chance: eight of 16 would take 0.08
        (measured(0.0, s128=9.0), 128),  # no bound
        (ChunkSizes(SIZES, 0.1), 128),
    ],
)
def test_the_largest_that_keeps_the_bound(chunks, wanted):
    assert chunks.most_tokens(others_decode=True) == wanted
    assert chunks.most_tokens(others_decode=False) == 128


def test_times_are_of_programs_and_late_ones_count():
    chunks = ChunkSizes(SIZES, 0.1)
    for seconds in [9.0] + 9 * [0.5]:
        chunks.took(100, seconds)  # the program of 128
    assert chunks.most_tokens(True) == 16
    for _ in range(9):
        chunks.took(128, 0.05)
    assert chunks.most_tokens(True) == 128


@pytest.mark.parametrize("gap_ms", [0.0, 1e-3])
@pytest.mark.parametrize("overlap", [True, False])
def test_prompts_are_cut_only_while_others_decode(tiny, oracle, gap_ms, overlap):
    """With a bound that nothing keeps, the smallest program's time decides. Tokens are the same."""
    engine = make_engine(
        tiny, chunked_prefill_size=64, prefill_token_buckets=(8, 64), max_decode_gap_ms=gap_ms,
        disable_radix_cache=True, disable_overlap_schedule=not overlap,
    )  # fmt: skip
    try:
        chunks = engine.scheduler.planner._chunks
        for _ in range(10):
            chunks.took(8, 1.0)
            chunks.took(64, 8.0)
        lengths, plan = [], engine.scheduler.planner.plan

        def recorded():
            batch = plan()
            if batch is not None and batch.tokens is not None:
                lengths.append(batch.tokens.shape[1])
            return batch

        engine.scheduler.planner.plan = recorded
        alone, beside = prompt_of(80), prompt_of(100, 1)
        add(engine, alone, greedy(30), "alone")
        while not engine._outputs or not any(s.num_scheduled > 80 for s in engine.scheduler.running):
            engine.step()
        assert lengths == [64, 16]
        del lengths[:]
        add(engine, beside, greedy(5), "beside")
        found = run(engine)
        assert lengths[:2] == ([8, 8] if gap_ms else [64, 36])
        assert sum(lengths) == 100
        assert found.ids("beside") == oracle(beside, 5)
    finally:
        engine.close()
