"""Llama models with random weights, as folders an engine can open: step time is a matter of size, not of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from jaxserve.models.loading.checkpoint import open_checkpoint

NUM_WORDS = 256  # token ids the tokenizer knows; prompts are made of them, and nothing else is sampled


def llama(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int,
          vocab_size: int) -> dict[str, Any]:  # fmt: skip
    """``config.json`` of a Llama.

    It has an output matrix of its own: a random model that shares it with the embedding only repeats the last token. A
    step reads one of the two as a whole, so its time is the same.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


# From a step that is nearly all overhead to the default model's, some four times longer each.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": llama(256, 704, 2, 4, 2, 1024),
    "small": llama(256, 704, 6, 4, 2, 4096),
    "medium": llama(384, 1024, 8, 6, 6, 8192),
    "smollm2-135m": llama(576, 1536, 30, 9, 3, 49152),
}


# The sizes of published 8B models.
COMPARED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **llama(4096, 14336, 32, 32, 8, 128256),
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-8b": {
        **llama(4096, 12288, 36, 32, 8, 151936), "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    },
}  # fmt: skip
TINY_QWEN3 = MODELS["tiny"] | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64}


def config_of(model: str | Path) -> tuple[str, dict[str, Any]]:
    """Name and ``config.json`` of a checkpoint on disk; its weights are not read.

    Raises:
        ModelLoadError: it cannot be opened.
    """
    checkpoint = open_checkpoint(model)
    return checkpoint.name, dict(checkpoint.config)


def write_model(folder: Path, config: Mapping[str, Any], context_length: int) -> Path:
    """A folder to be opened with ``load_format="dummy"``.

    Args:
        folder: where to write; made if it is not there.
        config: sizes, as in ``config.json``.
        context_length: most tokens of a sequence, whatever ``config`` says: how far positions go costs nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = {**config, "max_position_embeddings": context_length}
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    save_file({}, folder / "model.safetensors")  # an engine opens the file, but reads nothing from it
    words = {f"<{i}>": i for i in range(min(NUM_WORDS, config["vocab_size"]))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<0>"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
