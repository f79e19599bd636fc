"""On a GPU no program holds a conditional, which would make the host wait; greedy batches have their own programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax._src.interpreters.mlir import ir

from jaxserve.attention.xla import XlaBackend
from jaxserve.core.config import EngineConfig
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import abstract_model
from jaxserve.runner import sampler
from jaxserve.runner.either import either
from jaxserve.runner.phase_runner import PhaseRunner
from jaxserve.runner.prompt_reader import make_score_program
from jaxserve.runner.sampler import sample
from jaxserve.runner.sampling_rows import sampling_row
from jaxserve.runner.step_program import DraftForm, DraftRows
from jaxserve.testing.configuration_programs import ConfigurationPrograms
from jaxserve.testing.step_programs import step_program

VOCAB = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_tiny(tmp_path_factory.mktemp("tiny"))


def conditionals(function, arguments, platform: str) -> int:
    """Conditionals of the program that depend on anything; what is chosen by the platform is not counted."""
    module = jax.jit(function, keep_unused=True).trace(*arguments).lower(lowering_platforms=(platform,))
    found = 0

    def look(operation):
        nonlocal found
        if operation.name in ("stablehlo.case", "stablehlo.if") and len(operation.regions) > 1:
            made_by = operation.operands[0].owner
            found += getattr(made_by, "name", "an argument") != "stablehlo.constant"
        return ir.WalkResult.ADVANCE

    module.compiler_ir("stablehlo").operation.walk(look)
    return found


@pytest.mark.parametrize(
    ("mode", "queries", "drafts"),
    [
        (ForwardMode.DECODE, 1, DraftForm()),
        (ForwardMode.TARGET_VERIFY, 3, DraftForm()),
        (ForwardMode.TARGET_VERIFY, 3, DraftForm(DraftRows.LIVE, is_tree=True)),
        (ForwardMode.EXTEND, 16, DraftForm()),
    ],
    ids=["decode", "verify", "trees", "extend"],
)
def test_only_programs_for_a_cpu_hold_conditionals(model, mode, queries, drafts):
    config = open_checkpoint(model).model_config
    batch = 1 if mode is ForwardMode.EXTEND else 4
    program = step_program(config, XlaBackend(), mode, batch=batch, queries=queries, drafts=drafts)
    assert conditionals(*program, "cpu") >= 5
    assert conditionals(*program, "cuda") == 0


@pytest.mark.parametrize("topk", [None, 2], ids=["chains", "trees"])
def test_nor_do_those_of_draft_models(model, topk):
    few = {"decode_batch_buckets": (2,), "max_running_requests": 2, "prefill_token_buckets": (16,)}
    config = EngineConfig(
        model=str(model), attention_backend="xla", context_length=64, chunked_prefill_size=16,
        speculative_algorithm="STANDALONE", speculative_draft_model_path=str(model), speculative_num_steps=2,
        speculative_eagle_topk=topk, **few,
    )  # fmt: skip
    programs = [p for p in ConfigurationPrograms(config).programs() if p.cache is p.runner.steps]
    by_mode = {(p.runner.kind, p.key.shape.mode): p for p in programs}
    assert {kind for kind, _ in by_mode} == {"step", "draft"}
    for program in by_mode.values():
        traceable = program.cache.traceable(program.key)
        assert conditionals(*traceable, "cuda") == 0, program.name


def test_nor_does_the_program_that_scores_prompts(model):
    loaded = abstract_model(open_checkpoint(model).model_config, jnp.float32)
    hidden = jax.ShapeDtypeStruct((16, loaded.config.hidden_size), jnp.float32)
    tokens, number, flag = (jax.ShapeDtypeStruct(*each) for each in (((1, 16), int), ((), int), ((), bool)))
    program = make_score_program(loaded.bind, None)
    arguments = (loaded.leaves, hidden, tokens, number, number, flag)
    assert conditionals(program, arguments, "cpu") == 1 and conditionals(program, arguments, "cuda") == 0


def select(predicate, changed, unchanged, *operands):
    """``either`` as on a GPU."""
    return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), changed(*operands), unchanged(*operands))


def test_a_choice_is_the_same_computed_either_way():
    def choose(x):
        return either(x[0] > 0, lambda x: (x + 1, x * 2), lambda x: (x - 1, x), x)

    for first in (-1.0, 1.0):
        x = jnp.array([first, 5.0])
        here, there = jax.jit(choose)(x), select(x[0] > 0, lambda x: (x + 1, x * 2), lambda x: (x - 1, x), x)
        assert [a.tolist() for a in here] == [b.tolist() for b in there]


MIXED = (
    SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_k=9), SamplingParams(logprobs=3),
    SamplingParams(temperature=1.5, top_p=0.7, min_p=0.01, logprobs=0),
)  # fmt: skip


def sampled(params: list[SamplingParams], **more):
    rows = [sampling_row(each, seed, VOCAB) for seed, each in enumerate(params)]
    floats, ints = (jnp.asarray(np.stack(columns)) for columns in zip(*rows, strict=True))
    logits = 3 * jax.random.normal(jax.random.key(3), (len(params), VOCAB))
    return jax.jit(lambda *arrays: sample(*arrays, **more))(logits, floats, ints, jnp.arange(len(params)))


def test_what_is_sampled_is_the_same_where_nothing_branches(monkeypatch):
    wanted = sampled(list(MIXED))
    greedy = sampled(list(MIXED), is_greedy=True)
    monkeypatch.setattr(sampler, "either", select)
    found = sampled(list(MIXED))
    assert found.tokens.tolist() == wanted.tokens.tolist() and found.finite.tolist() == wanted.finite.tolist()
    for name in ("logprobs", "top_ids", "top_logprobs"):
        assert np.allclose(getattr(found, name), getattr(wanted, name), atol=1e-6), name
    assert greedy.tokens[0] == wanted.tokens[0] and greedy.finite.tolist() == wanted.finite.tolist()
    assert greedy.tokens.tolist() != wanted.tokens.tolist() and not np.any(greedy.logprobs)


def serve(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    for i, each in enumerate(params):
        engine.add(Request(f"r{i}", (5, 6, 7 + i), each))
    tokens: list[list[int]] = [[] for _ in params]
    while engine.has_work:
        for delta in engine.step():
            tokens[int(delta.request_id[1:])] += delta.token_ids
    return tokens


def test_greedy_batches_run_their_own_programs(model, monkeypatch):
    """As on a GPU, where both are compiled at warm-up and nothing afterwards."""
    monkeypatch.setattr(PhaseRunner, "has_greedy_programs", True)
    engine = Engine(EngineConfig(
        model=str(model), context_length=32, page_size=4, max_running_requests=2, chunked_prefill_size=16,
        prefill_token_buckets=(16,), decode_batch_buckets=(2,),
    ))  # fmt: skip
    steps = engine.parts.worker.step_runner.steps
    used: list[bool] = []
    call = steps.call
    monkeypatch.setattr(steps, "call", lambda key, *a: used.append(key.is_greedy) or call(key, *a))
    alike = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    try:
        greedy = serve(engine, [SamplingParams(**alike)] * 2)
        assert used and all(used)
        for one in ({"logprobs": 1}, {"temperature": 1.0}, {"logit_bias": {3: 1e-6}}, {"min_tokens": 1},
                    {"presence_penalty": 1e-6}, {"allowed_token_ids": list(range(250))}):  # fmt: skip
            used.clear()
            mixed = serve(engine, [SamplingParams(**alike), SamplingParams(**alike | one)])
            assert mixed[0] == greedy[0]
            assert not all(used), one
        assert engine.num_late_compiles == 0
    finally:
        engine.close()
