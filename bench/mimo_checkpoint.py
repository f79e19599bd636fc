"""Writes a MiMo-V2-Flash with random weights, whose decode step is worth measuring and whose text can be learned.

python bench/mimo_checkpoint.py --output mimo
jaxserve train-draft --algorithm mtp --model mimo --output mimo-mtp --num-layers 2
jaxserve bench spec --model mimo-mtp --ways plain,MTP=mimo-mtp

Tokenizer and chat template are the default model's. Nobody publishes a small model of this architecture, and random
weights alone write text nobody can guess, or one token for ever. So the head is made to follow: of some ids each is
mostly followed by one certain id, and now and then by a second one, as the layers, which are random, have it. What it
says means nothing; how long a step takes, and what a share of drafts that hold is worth, does not depend on that.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.default_model import default_model_path

NUM_WRITTEN = 2048  # ids it writes
SECOND = 0.95  # score of the second id that may follow, relative to the first
TOP_SCORE = 12.0  # logit of the first; all others are some 0 +- 1
LAYER_SIZE = 0.15  # root mean square of what a layer adds, beside the embedding's 1


def config_of(hidden: int, num_layers: int, source: Checkpoint) -> dict[str, Any]:
    """``config.json``: a dense layer and sparse ones, every sixth of full attention as in the published model."""
    return {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "vocab_size": source.model_config.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": hidden,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "v_head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["full_attention" if i % 6 == 0 else "sliding_attention" for i in range(num_layers)],
        "mlp_layer_types": ["dense"] + ["sparse"] * (num_layers - 1),
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": source.tokenizer.bos_token_id,
        "eos_token_id": list(source.model_config.eos_token_ids) or None,
    }


def tensors_of(config: dict[str, Any], special_ids: frozenset[int], seed: int) -> dict[str, np.ndarray]:
    """Weights under the names transformers gives them.

    Args:
        special_ids: ids that are never written.
    """
    random = np.random.default_rng(seed)
    hidden, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]

    def matrix(rows: int, columns: int, size: float = 1.0) -> np.ndarray:
        """Gives a row of root mean square 1 one of ``size``."""
        return (random.standard_normal((rows, columns)) * size / np.sqrt(columns)).astype(np.float32)

    def mlp(source: str, inner: int, size: float) -> dict[str, np.ndarray]:
        # silu(gate) * up of unit normals has a root mean square of some 0.6.
        return {
            f"{source}.gate_proj.weight": matrix(inner, hidden),
            f"{source}.up_proj.weight": matrix(inner, hidden),
            f"{source}.down_proj.weight": matrix(hidden, inner, size / 0.6),
        }

    embed = random.standard_normal((config["vocab_size"], hidden)).astype(np.float32)
    tensors = {"model.embed_tokens.weight": embed, "model.norm.weight": np.ones(hidden, np.float32)}
    for i, (attention, kind) in enumerate(zip(config["layer_types"], config["mlp_layer_types"], strict=True)):
        layer = f"model.layers.{i}"
        kv_heads = config["num_key_value_heads"] * (1 if attention == "full_attention" else 2)
        for name, rows in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = matrix(rows, hidden)
        tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim, LAYER_SIZE)
        if attention != "full_attention":
            tensors[f"{layer}.self_attn.attention_sink_bias"] = np.zeros(heads, np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = np.ones(hidden, np.float32)
        if kind == "dense":
            tensors |= mlp(f"{layer}.mlp", config["intermediate_size"], LAYER_SIZE)
            continue
        experts = config["n_routed_experts"]
        tensors[f"{layer}.mlp.gate.weight"] = matrix(experts, hidden)
        tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = np.zeros(experts, np.float32)
        for expert in range(experts):
            tensors |= mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"], LAYER_SIZE)
    tensors["lm_head.weight"] = _following(embed, special_ids, random)
    return tensors


def _following(embed: np.ndarray, special_ids: frozenset[int], random: np.random.Generator) -> np.ndarray:
    """The head: behind each of the ids that are written a first id is likely, and a second one nearly as much."""
    ordinary = np.setdiff1d(np.arange(len(embed)), list(special_ids))
    written = random.choice(ordinary, min(NUM_WRITTEN, ordinary.size), replace=False)
    head = np.zeros_like(embed)
    for order, score in ((random.permutation(written), 1.0), (random.permutation(written), SECOND)):
        head[order] += score * embed[written]
    # The final norm takes a fifth of it, for the layers have added to the residual stream.
    return (head * TOP_SCORE / embed.shape[1]).astype(np.float32)


def write_checkpoint(folder: Path, source: Checkpoint, hidden: int = 512, num_layers: int = 12, seed: int = 0) -> Path:
    """Writes the model, in bfloat16, with the tokenizer and chat template of ``source``."""
    folder.mkdir(parents=True, exist_ok=True)
    config, tokenizer = config_of(hidden, num_layers, source), source.tokenizer
    tensors = tensors_of(config, frozenset(tokenizer.special_ids), seed)
    save_file({name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    roles = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    named = {f"{role}_token": tokenizer.backend.id_to_token(i) for role, i in roles.items() if i is not None}
    named |= {"add_bos_token": tokenizer.adds_bos, "chat_template": source.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="a multiple of 256 (default 512)")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="at least 2 (default 12)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (default 0)")
    arguments = parser.parse_args()
    if arguments.hidden % 256 or arguments.hidden < 256 or arguments.layers < 2:
        parser.error(
            f"wanted --hidden a multiple of 256 and --layers >= 2, got {arguments.hidden} and {arguments.layers}"
        )
    source = open_checkpoint(default_model_path())
    folder = write_checkpoint(arguments.output, source, arguments.hidden, arguments.layers, arguments.seed)
    print(f"{folder}: {(folder / 'model.safetensors').stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
