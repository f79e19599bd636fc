"""Flax NNX models, and loading them from checkpoints."""

from __future__ import annotations

from jaxserve.models.llama import LlamaForCausalLM, llama_weight_map
from jaxserve.models.mimo_v2_config import read_mimo_v2_config
from jaxserve.models.mimo_v2_flash import MiMoV2FlashForCausalLM, mimo_v2_weight_map
from jaxserve.models.qwen3 import Qwen3ForCausalLM, qwen3_weight_map, read_qwen3_config
from jaxserve.models.registry import register_model

register_model("LlamaForCausalLM", LlamaForCausalLM, llama_weight_map)
register_model("Qwen3ForCausalLM", Qwen3ForCausalLM, qwen3_weight_map, config_reader=read_qwen3_config)
register_model(
    "MiMoV2FlashForCausalLM",
    MiMoV2FlashForCausalLM,
    mimo_v2_weight_map,
    config_reader=read_mimo_v2_config,
    draft_prefixes=("model.mtp.",),
)
