"""Flax NNX models, and loading them from checkpoints."""

from __future__ import annotations

from jaxserve.models.llama import LlamaForCausalLM, llama_weight_map
from jaxserve.models.registry import register_model

register_model("LlamaForCausalLM", LlamaForCausalLM, llama_weight_map)
