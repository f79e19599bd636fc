"""A tiny MiMo-V2-Flash through the engine: mixture of experts, windows shorter than the prompts, attention sinks."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import greedy_full_recompute
from rig import generate, greedy, make_engine, prompt_of

from jaxserve.attention.native import NativeBackend
from jaxserve.attention.registry import _BUILT_IN as BACKENDS
from jaxserve.attention.xla import XlaBackend
from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import LoadedModel, load_model
from jaxserve.testing.step_programs import aliased_outputs, compiled_text, copies_of_shape, step_program

MIMO = Path(__file__).parent.parent / "fixtures" / "mimo"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    arrays = np.load(MIMO / "expected.npz")
    return {name: arrays[name].tolist() for name in ("token_ids", "generated")}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(open_checkpoint(MIMO), jnp.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1},
        {"page_size": 4, "attention_backend": "xla"},
        {"page_size": 4, "speculative_algorithm": "NGRAM", "speculative_adaptive": False},
    ],
    ids=str,
)
def test_greedy_output_equals_transformers_and_full_recompute(
    settings: dict, expected: dict[str, list[int]], loaded: LoadedModel
) -> None:
    """Two sequences run together; the prompt of one takes two chunks."""
    other = prompt_of(9, seed=4)
    engine = make_engine(MIMO, **settings)
    try:
        outputs = generate(engine, [(expected["token_ids"], greedy(NUM_TOKENS)), (other, greedy(NUM_TOKENS))])
    finally:
        engine.close()
    assert outputs[0].token_ids == expected["generated"]
    assert outputs[1].token_ids == greedy_full_recompute(loaded, other, NUM_TOKENS)


def test_the_loop_over_experts_leaves_the_pool_in_place(loaded: LoadedModel) -> None:
    config = loaded.config
    function, arguments = step_program(config, NativeBackend(), ForwardMode.DECODE, batch=4, num_pages=57)
    text = compiled_text(function, arguments)
    pool = (config.num_layers, 2, config.num_kv_heads, 57, 16, config.head_dim)
    assert copies_of_shape(text, pool) == []
    assert len(loaded.leaves) in aliased_outputs(text)


def test_a_backend_without_sinks_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldBackend(XlaBackend):
        def attend(self, step, layer, q, k, v):
            raise AssertionError("the engine must not come this far")

    assert not OldBackend.supports_sinks
    monkeypatch.setitem(BACKENDS, "old", OldBackend)
    with pytest.raises(ConfigError, match=r"has attention sinks, which the attention backend .* does not support"):
        make_engine(MIMO, attention_backend="old")
    with pytest.raises(ConfigError, match="has attention sinks"):
        make_engine(MIMO, attention_backend="hybrid", decode_attention_backend="old")


def test_sinks_are_never_dropped_while_a_program_is_traced(loaded: LoadedModel) -> None:
    """Whoever makes programs without an engine, too."""

    class OldBackend(XlaBackend):
        def attend(self, step, layer, q, k, v):
            return super().attend(step, layer, q, k, v)

    function, arguments = step_program(loaded.config, OldBackend(), ForwardMode.DECODE, batch=1)
    with pytest.raises(ConfigError, match="has attention sinks"):
        compiled_text(function, arguments)
