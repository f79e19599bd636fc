"""Writes a small random checkpoint for ``own_model.py``: config, weights under names of its own, byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB, HIDDEN, INNER, LAYERS, HEADS, CONTEXT = 257, 48, 96, 2, 4, 128
END = 256


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Fills ``folder`` and returns it."""
    random = np.random.default_rng(seed)

    def weights(*shape: int) -> np.ndarray:
        return random.normal(0.0, 0.3, shape).astype(np.float32)

    tensors = {"wte": weights(VOCAB, HIDDEN), "wpe": weights(CONTEXT, HIDDEN)}
    for layer in range(LAYERS):
        tensors |= {
            f"h.{layer}.attn_in.w": weights(HIDDEN, 3 * HIDDEN),
            f"h.{layer}.attn_out.w": weights(HIDDEN, HIDDEN),
            f"h.{layer}.fc.w": weights(HIDDEN, INNER),
            f"h.{layer}.fc.b": weights(INNER),
            f"h.{layer}.proj.w": weights(INNER, HIDDEN),
            f"h.{layer}.proj.b": weights(HIDDEN),
        }
    for norm in ["ln_f", *(f"h.{layer}.ln_{i}" for layer in range(LAYERS) for i in (1, 2))]:
        tensors |= {f"{norm}.g": 1 + weights(HIDDEN), f"{norm}.b": weights(HIDDEN)}
    save_file(tensors, folder / "model.safetensors")

    config = {
        "architectures": ["OwnModel"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(config))

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
