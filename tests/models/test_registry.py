"""Bring-your-own models: registration and its refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import full_recompute_logits
from tiny import byte_tokenizer_files, tiny_config, write_folder

from jaxserve.core.errors import ConfigError, ModelLoadError
from jaxserve.models import registry
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import load_model


class Bigram(nnx.Module):
    """The smallest model: logits are a row of a table."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        self.table = nnx.Param(jnp.zeros((config.vocab_size, config.vocab_size), dtype))

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Any) -> jax.Array:
        return self.table[...][token_ids]

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden.astype(jnp.float32)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    yield


def test_own_model_loads_by_tensor_names(tmp_path: Path) -> None:
    registry.register_model("Bigram", Bigram)
    table = np.random.default_rng(0).standard_normal((260, 260)).astype(np.float32)
    path = write_folder(byte_tokenizer_files(tmp_path), tiny_config(architectures=["Bigram"]), {"table": table})
    loaded = load_model(open_checkpoint(path), jnp.float32)
    np.testing.assert_array_equal(full_recompute_logits(loaded, [3, 9]), table[[3, 9]])


def test_registering_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*already registered"):
        registry.register_model("LlamaForCausalLM", Bigram)


def test_class_without_logits_is_refused() -> None:
    with pytest.raises(ConfigError, match="logits"):
        registry.register_model("Nothing", nnx.Linear)


def test_unknown_architecture_lists_the_known() -> None:
    config = ModelConfig.from_hf(tiny_config())
    assert registry.model_class_for(config) is LlamaForCausalLM
    with pytest.raises(ModelLoadError, match=r"'Unheard'.*LlamaForCausalLM"):
        registry.model_class_for(dataclasses.replace(config, architecture="Unheard"))


@pytest.mark.parametrize(
    ("names", "refusal"),
    [
        (["tables"], "tables is not a parameter"),
        ([], "parameters without a tensor: table"),
        (["table", "table"], "twice"),
    ],
)
def test_weight_map_must_fit(tmp_path: Path, names: list[str], refusal: str) -> None:
    zeros = np.zeros((260, 260), np.float32)
    registry.register_model("Bigram", Bigram, lambda config, tensors: [(name, tensors["table"]) for name in names])
    config = tiny_config(architectures=["Bigram"])
    checkpoint = open_checkpoint(write_folder(byte_tokenizer_files(tmp_path), config, {"table": zeros}))
    with pytest.raises(ModelLoadError, match=refusal):
        load_model(checkpoint, jnp.float32)


def test_an_installed_package_can_register_its_model(monkeypatch):
    """A server has no place to call register_model; an entry point is called when an architecture is looked up."""
    registered = []

    class Entry:
        name = "mine"

        def load(self):
            return lambda: registered.append("called")

    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry()] if group == "jaxserve.models" else [])
    monkeypatch.setattr(registry, "_loaded_entry_points", set())
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="not known"):
            registry.registered_model_for(SimpleNamespace(architecture="Nobody"))
    assert registered == ["called"]
