"""Who is served when, counted in steps; and what happens when a step does not come back."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
from rig import add, generate, greedy, make_engine, prompt_of, run

from jaxserve.core.errors import EngineDead
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.request import Request
from jaxserve.engine.async_engine import AsyncEngine


def watched(engine):
    """A list to which every plan adds (mode, ids of its requests)."""
    plans = []
    plan = engine.scheduler.planner.plan

    def recorded():
        batch = plan()
        if batch is not None:
            plans.append((batch.mode, [s.request.request_id for s in batch.owners]))
        return batch

    engine.scheduler.planner.plan = recorded
    return plans


def test_prompts_and_decoders_share_the_steps(tiny):
    """A decoder waits for one chunk at most; a short prompt for one chunk of the long one, which gets every second."""
    engine = make_engine(tiny, disable_radix_cache=True)
    try:
        add(engine, prompt_of(3), greedy(60), "decoder")
        for _ in range(3):
            engine.step()
        plans = watched(engine)
        add(engine, prompt_of(112, 1), greedy(2), "long")
        engine.step()
        for number in range(2):
            add(engine, prompt_of(30, number), greedy(2), f"short-{number}")
        run(engine)
        last_chunk = max(i for i, (mode, _) in enumerate(plans) if mode is ForwardMode.EXTEND)
        for (mode, _), (following, _) in itertools.pairwise(plans[:last_chunk]):
            assert ForwardMode.DECODE in (mode, following), "two chunks in a row kept the decoder waiting"
        chunks = [ids[0] for mode, ids in plans if mode is ForwardMode.EXTEND]
        assert len(chunks) == 7 + 2 * 2
        assert max(i for i, name in enumerate(chunks) if name == "short-1") <= 9, "the short ones waited for it all"
        assert chunks[:9].count("long") >= 4, "the long one starved"
    finally:
        engine.close()


def test_priorities_order_the_queue_and_choose_who_gives_way(tiny, oracle):
    """Lower is earlier; of those that run, the highest number is preempted first."""
    engine = make_engine(tiny, schedule_policy="priority", num_pages=40, max_running_requests=6,
                         decode_batch_buckets=(6,))  # fmt: skip
    try:
        prompts = [prompt_of(12, seed) for seed in range(6)]
        for number, prompt in enumerate(prompts):
            engine.add(Request(str(number), tuple(prompt), greedy(60), priority=-number))
        assert engine.scheduler.waiting.first().request.request_id == "5"
        preempted = []
        preempt = engine.scheduler.residency.preempt

        def recorded(sequence):
            preempted.append(sequence.request.request_id)
            preempt(sequence)

        engine.scheduler.residency.preempt = recorded
        collected = run(engine)
        assert preempted[0] == "0" and "5" not in preempted
        assert all(collected.ids(str(i)) == oracle(prompt, 60) for i, prompt in enumerate(prompts))
    finally:
        engine.close()


def test_a_step_that_hangs_ends_the_engine_and_not_the_clients(tiny):
    engine = make_engine(tiny, watchdog_timeout_s=0.4)
    generate(engine, [(prompt_of(5), greedy(3))])  # compiles
    serving, go_on = AsyncEngine(engine), threading.Event()
    engine.step = lambda: go_on.wait(20) and []

    async def client():
        await serving.start()
        stream = serving.generate(prompt_of(5), greedy(3))
        with pytest.raises(EngineDead, match="--watchdog-timeout"):
            await asyncio.wait_for(anext(stream), 15)
        with pytest.raises(EngineDead, match="--watchdog-timeout"):
            serving.fatal.result(1)
        assert "watchdog" in serving.state()["dead"] and not serving.state()["ready"]
        go_on.set()
        await serving.stop(0)

    asyncio.run(client())
