"""What requests are told of their prompts: log-probabilities and pooled hidden states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import full_attention, full_recompute_logits
from rig import Collected, add, greedy, make_engine, prompt_of
from tiny import write_tiny

from jaxserve.engine.engine import Engine
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import load_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    engine = make_engine(checkpoint)
    yield engine
    engine.close()


def run(engine: Engine) -> Collected:
    collected = Collected()
    while engine.has_work:
        collected.take(engine.step())
    return collected


@pytest.fixture(scope="module")
def loaded(checkpoint: Path):
    return load_model(open_checkpoint(checkpoint), jnp.float32)


def oracle_logprobs(loaded, prompt: list[int]) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(full_recompute_logits(loaded, prompt), -1))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 41])
def test_every_prompt_token_has_the_logprob_that_a_full_recompute_gives(engine: Engine, loaded, length: int) -> None:
    prompt = prompt_of(length)
    request = add(engine, prompt, greedy(2, prompt_logprobs=3, logprobs=1))
    found = run(engine)[request].prompt_logprobs
    wanted = oracle_logprobs(loaded, prompt)
    assert found is not None and len(found) == length and found[0] is None
    for place, one in enumerate(found[1:], 1):
        row = wanted[place - 1]
        assert one is not None and one.token_id == prompt[place]
        assert one.logprob == pytest.approx(row[prompt[place]], abs=1e-4)
        assert one.rank == 1 + int((row > row[prompt[place]]).sum())
        assert [token for token, _ in one.top] == np.argsort(-row)[:3].tolist()
        assert [value for _, value in one.top] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-4)


def test_output_0_speaks_for_all_and_others_pay_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, read = engine.parts.worker.step_runner._prompt_reader, []
    original = reader.read
    monkeypatch.setattr(reader, "read", lambda *arguments: read.append(1) or original(*arguments))
    asks = add(engine, prompt_of(20), greedy(3, prompt_logprobs=0, n=2))
    plain = add(engine, prompt_of(20), greedy(3))
    collected = run(engine)
    first, second = collected.outputs[asks, 0], collected.outputs[asks, 1]
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 20
    assert all(one is None or one.top == () for one in first.prompt_logprobs)
    assert second.prompt_logprobs is None and collected[plain].prompt_logprobs is None
    assert first.token_ids == second.token_ids == collected[plain].token_ids
    told = [delta for delta in collected.deltas if delta.prompt_logprobs is not None]
    assert len(told) == 1 and len(read) == 2  # the two chunks of one prompt


def test_a_preempted_prompt_is_told_once_and_right(checkpoint: Path, loaded) -> None:
    engine = make_engine(checkpoint, num_pages=16)
    prompts = [prompt_of(30, seed) for seed in range(3)]
    requests = [add(engine, prompt, greedy(20, prompt_logprobs=0)) for prompt in prompts]
    collected = run(engine)
    assert engine.scheduler.num_preemptions > 0
    for prompt, request in zip(prompts, requests, strict=True):
        found, wanted = collected[request].prompt_logprobs, oracle_logprobs(loaded, prompt)
        assert found is not None
        values = [wanted[i - 1][prompt[i]] for i in range(1, 30)]
        assert [one.logprob for one in found if one is not None] == pytest.approx(values, abs=1e-4)
    engine.close()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_hidden_states_are_pooled_over_all_chunks(engine: Engine, loaded, pooling: str) -> None:
    prompt = prompt_of(41)
    request = add(engine, prompt, greedy(1, pooling=pooling))
    found = run(engine)[request].embedding
    model = loaded.bind(loaded.leaves)
    ids = jnp.array(prompt, jnp.int32)
    states = model(ids, jnp.arange(41, dtype=jnp.int32), full_attention(loaded.config.attention_windows))
    wanted = states[-1] if pooling == "last" else states.mean(0)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_after_warm_up_nothing_is_compiled_for_it(checkpoint: Path) -> None:
    """O-36: the first request that asks for prompt logprobs or an embedding compiles nothing."""
    engine = make_engine(checkpoint, skip_warmup=False, prefill_token_buckets=(8, 16))
    compiled: list[str] = []

    def listener(event: str, duration: float, **_: object) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for length in (3, 16, 20):
            add(engine, prompt_of(length), greedy(2, prompt_logprobs=2))
            add(engine, prompt_of(length), greedy(1, pooling="mean"))
            run(engine)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled == [] and engine.num_late_compiles == 0
    engine.close()


def test_the_llm_tells_too(checkpoint: Path) -> None:
    from rig import SETTINGS

    from jaxserve import LLM, SamplingParams

    with LLM(str(checkpoint), **SETTINGS) as llm:
        [asked] = llm.generate("Hello", SamplingParams(max_tokens=1, prompt_logprobs=0))
        [plain] = llm.generate("Hello", SamplingParams(max_tokens=1))
    assert asked.prompt_logprobs is not None and len(asked.prompt_logprobs) == 5 and asked.prompt_logprobs[0] is None
    assert all(one is not None and math.isfinite(one.logprob) for one in asked.prompt_logprobs[1:])
    assert plain.prompt_logprobs is None


def test_speculation_does_not_change_what_is_told(checkpoint: Path, loaded) -> None:
    engine = make_engine(
        checkpoint, speculative_algorithm="NGRAM", speculative_num_draft_tokens=4, speculative_adaptive=False
    )
    prompt = list(b"abcabcabcabcabcabcabc")
    request = add(engine, prompt, greedy(8, prompt_logprobs=0))
    found, wanted = run(engine)[request].prompt_logprobs, oracle_logprobs(loaded, prompt)
    assert found is not None
    values = [wanted[place - 1][prompt[place]] for place in range(1, len(prompt))]
    assert [one.logprob for one in found if one is not None] == pytest.approx(values, abs=1e-4)
    engine.close()
