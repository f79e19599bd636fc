"""The engine behind a server: streams, cancellation, death and shutdown."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rig import check_idle, greedy, make_engine, prompt_of

from jaxserve.barrier.native import native_module
from jaxserve.core.errors import CapacityError, EngineDead, InvalidRequest
from jaxserve.core.request import OutputDelta
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.async_engine import AsyncEngine


@pytest.fixture
def serve(tiny):
    """``serve(main, **settings)`` runs ``main(async_engine)`` and checks that nothing is left."""

    def serve(main: Callable[[AsyncEngine], Awaitable[Any]], healthy: bool = True, **settings: Any) -> None:
        engine = AsyncEngine(make_engine(tiny, **settings))

        async def whole() -> None:
            await engine.start()
            try:
                await asyncio.wait_for(main(engine), 60)
            finally:
                await engine.stop(drain_s=0)

        asyncio.run(whole())
        assert not engine._thread.is_alive()
        assert not engine._streams and engine._num_open == 0
        if healthy:
            assert engine.state()["dead"] is None
            check_idle(engine._engine)

    return serve


async def ids_of(stream) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to pass")


def test_a_day_in_the_life(serve, oracle):
    """Everything a healthy engine does, in one engine's life."""

    async def main(engine: AsyncEngine) -> None:
        await concurrent_requests_are_right_and_in_order(engine, oracle)
        await refusals_come_at_call_time(engine)
        await a_stream_that_is_left_aborts(engine, oracle)
        await an_id_names_one_request_at_a_time(engine, oracle)
        await idle_costs_nothing(engine)

    serve(main, max_queued_requests=12)


async def concurrent_requests_are_right_and_in_order(engine: AsyncEngine, oracle) -> None:
    prompts = [prompt_of(3 + 4 * i, i) for i in range(8)]
    answers = await asyncio.gather(*(ids_of(engine.generate(prompt, greedy(12))) for prompt in prompts))
    assert answers == [oracle(prompt, 12) for prompt in prompts]

    deltas = [d async for d in engine.generate("text", greedy(6, n=3))]
    for index in range(3):
        own = [d for d in deltas if d.index == index]
        assert [t for d in own for t in d.token_ids] == oracle(list(b"text"), 6)
        assert [d.finish_reason for d in own] == [None] * 5 + ["length"]


async def refusals_come_at_call_time(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        engine.generate([], greedy(1))
    with pytest.raises(InvalidRequest, match="token ids of prompt"):
        engine.generate([260], greedy(1))
    with pytest.raises(InvalidRequest, match="context length is 128"):
        engine.generate([1] * 127, greedy(5))
    with pytest.raises(InvalidRequest, match="n is 17") as too_many:
        engine.generate([1], greedy(1, n=17))
    assert too_many.value.param == "n"
    streams = [engine.generate([1], greedy(100)) for _ in range(16)]
    with pytest.raises(CapacityError, match="--max-queued-requests") as full:
        engine.generate([1], greedy(1))
    assert full.value.status == 429
    for stream in streams:
        await stream.aclose()
    await until(lambda: engine._num_open == 0)


async def a_stream_that_is_left_aborts(engine: AsyncEngine, oracle) -> None:
    closed = engine.generate(prompt_of(5), greedy(120))
    await anext(closed)
    await closed.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(closed)

    gate = native_module("cpu").hold_points
    gate.close("snapshot.before_reads")  # no step can end, so only the cancellation can end the stream
    try:
        held = engine.generate(prompt_of(5), greedy(120))
        cancelled = asyncio.create_task(ids_of(held))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    finally:
        gate.clear()
    assert held._closed
    del held

    engine.generate(prompt_of(5), greedy(120))  # lost
    gc.collect()

    neighbour = asyncio.create_task(ids_of(engine.generate(prompt_of(7), greedy(30))))
    elsewhere = engine.generate(prompt_of(5), greedy(120), "elsewhere")
    deltas: list[OutputDelta] = [await anext(elsewhere)]
    assert engine.abort("elsewhere")
    deltas += [d async for d in elsewhere]
    assert deltas[-1].finish_reason == "abort" and not deltas[-1].token_ids
    got = [t for d in deltas for t in d.token_ids]
    assert got == oracle(prompt_of(5), 120)[: len(got)] and len(got) < 120
    assert not engine.abort("elsewhere") and not engine.abort("never seen")
    assert await neighbour == oracle(prompt_of(7), 30)
    await until(lambda: engine._num_open == 0 and not engine._streams)


async def an_id_names_one_request_at_a_time(engine: AsyncEngine, oracle) -> None:
    first = engine.generate(prompt_of(4), greedy(40), "twice")
    with pytest.raises(InvalidRequest, match="'twice' is already in use"):
        engine.generate(prompt_of(4), greedy(40), "twice")
    gc.collect()  # the refused stream must not take the first one with it
    assert await ids_of(first) == oracle(prompt_of(4), 40)

    old = engine.generate(prompt_of(4), greedy(3), "again")
    await until(lambda: "again" not in engine._streams)  # ended, and not read yet
    new = engine.generate(prompt_of(4), greedy(40), "again")
    old._open_outputs = 1  # as if its last delta had not reached the loop yet
    await old.aclose()
    assert await ids_of(new) == oracle(prompt_of(4), 40)


async def idle_costs_nothing(engine: AsyncEngine) -> None:
    await until(lambda: not engine._engine.has_work)
    gc.collect()
    start = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - start < 0.025


def test_death_of_the_step_thread_reaches_everybody(serve):
    async def main(engine: AsyncEngine) -> None:
        dying = threading.Event()

        def die() -> list[OutputDelta]:
            dying.set()
            time.sleep(0.1)  # meanwhile more arrive, whose commands nobody will read
            raise SystemError("planted death")

        reading = [asyncio.create_task(ids_of(engine.generate(prompt_of(5), greedy(100)))) for _ in range(3)]
        await asyncio.sleep(0.05)
        engine._engine.step = die  # type: ignore[method-assign]
        await asyncio.to_thread(dying.wait)
        reading.append(asyncio.create_task(ids_of(engine.generate(prompt_of(5), greedy(5)))))
        for result in await asyncio.gather(*reading, return_exceptions=True):
            assert isinstance(result, EngineDead) and "planted death" in str(result)
        with pytest.raises(EngineDead, match="planted death"):
            engine.generate(prompt_of(5), greedy(5))
        assert engine.state()["dead"] == "SystemError: planted death" and not engine.state()["ready"]

    serve(main, healthy=False)


def test_stop_drains_and_then_aborts(tiny, oracle):
    engine = AsyncEngine(make_engine(tiny, max_running_requests=1, decode_batch_buckets=(1,)))

    async def main() -> None:
        await engine.start()
        short = asyncio.create_task(ids_of(engine.generate(prompt_of(5), greedy(20))))
        await asyncio.sleep(0)  # accepted, and perhaps not even queued
        stopping = asyncio.create_task(engine.stop(drain_s=30))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="shutting down") as refused:
            engine.generate(prompt_of(5), greedy(5))
        assert refused.value.status == 503
        assert await short == oracle(prompt_of(5), 20)
        await stopping

    asyncio.run(main())
    assert not engine._thread.is_alive()
    check_idle(engine._engine)


def test_stop_without_time_to_drain(serve):
    async def main(engine: AsyncEngine) -> None:
        streams = [engine.generate(prompt_of(5), greedy(120)) for _ in range(6)]
        first = await anext(streams[0])
        assert first.token_ids
        await engine.stop(drain_s=0)
        for stream in streams:
            assert [d async for d in stream][-1].finish_reason == "abort"

    serve(main)


def test_an_event_loop_that_closes_takes_its_requests_along(tiny):
    engine = AsyncEngine(make_engine(tiny))
    kept = []

    async def first() -> None:
        await engine.start()
        kept.append(engine.generate(prompt_of(5), greedy(120)))
        await anext(kept[0])

    asyncio.run(first())
    deadline = time.monotonic() + 20
    while engine._num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine._num_open == 0
    generated = engine.metrics.registry.get_sample_value(
        "jaxserve:generation_tokens_total", {"model_name": engine.model_name}
    )
    assert generated < 120
    asyncio.run(engine.stop(0))
    check_idle(engine._engine)


def test_a_command_that_is_refused_late_is_told(serve, monkeypatch):
    async def main(engine: AsyncEngine) -> None:
        def refuse(request) -> None:
            raise InvalidRequest("planted refusal")

        monkeypatch.setattr(engine._engine, "add", refuse)
        with pytest.raises(InvalidRequest, match="planted refusal"):
            await ids_of(engine.generate([1], SamplingParams(n=2)))
        monkeypatch.undo()
        assert len(await ids_of(engine.generate([1], greedy(3)))) == 3

    serve(main)
