"""Targets whose next letter follows from the last one with certainty, and texts they would write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tiny import BYTE_VOCAB, byte_tokenizer_files, write_folder, write_markov

from jaxserve.models.loading.checkpoint import open_checkpoint

MIMO = Path(__file__).parent.parent / "fixtures" / "mimo"
LETTERS = range(ord("a"), ord("z") + 1)
# Settings with which a draft learns such a text in seconds.
SMALL = {"sequence_length": 64, "batch_rows": 2, "eval_every": 8, "checkpoint_every": 4, "learning_rate": 3e-3,
         "held_out": 0.1, "epochs": 3.0}  # fmt: skip


def successor(byte: int) -> int:
    """Letters of the alphabet follow each other, everything else leads there."""
    return ord("a") + (byte * 7 + 3) % 26


def write_llama(path: Path) -> Path:
    """A Llama."""
    table = np.full((BYTE_VOCAB, BYTE_VOCAB), -30.0, np.float32)
    for byte in range(BYTE_VOCAB):
        table[byte, successor(byte)] = 0.0
    return write_markov(path, table, num_hidden_layers=2, num_attention_heads=4)


def write_mimo(path: Path, num_mtp_layers: int = 0, num_shards: int = 1) -> Path:
    """A MiMo-V2-Flash of a dense layer and a sparse one with a sliding window, with random MTP layers or none."""
    source = open_checkpoint(MIMO)
    config: dict[str, Any] = {**source.config, "num_hidden_layers": 2}
    config |= {key: config[key][:2] for key in ("layer_types", "mlp_layer_types")}
    kept = ("model.layers.0.", "model.layers.1.", *(f"model.mtp.layers.{i}." for i in range(num_mtp_layers)))
    tensors = {name: np.array(tensor) for name, tensor in source.tensors.items() if name.startswith(kept)}
    for name in tensors:
        if ".mtp." not in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name][:] = 0
    hidden = config["hidden_size"]
    # A one-hot row of root mean square 1 for each letter, and one for all other bytes.
    kinds = np.array([byte - LETTERS.start if byte in LETTERS else 26 for byte in range(BYTE_VOCAB)])
    tensors["model.embed_tokens.weight"] = np.sqrt(hidden).astype(np.float32) * np.eye(hidden, dtype=np.float32)[kinds]
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    head = np.full((BYTE_VOCAB, hidden), -1.0, np.float32)
    for byte in (*LETTERS, 0):
        head[successor(byte), kinds[byte]] = 1.0
    tensors["lm_head.weight"] = 10 / np.sqrt(hidden).astype(np.float32) * head
    return write_folder(byte_tokenizer_files(path), config, tensors, num_shards)


def write_texts(path: Path) -> Path:
    """Forty texts of sixty letters, as training data."""
    random = np.random.default_rng(0)
    lines = []
    for _ in range(40):
        text = [int(random.integers(LETTERS.start, LETTERS.stop))]
        while len(text) < 60:
            text.append(successor(text[-1]))
        lines.append(json.dumps({"text": bytes(text).decode()}))
    path.write_text("\n".join(lines))
    return path
