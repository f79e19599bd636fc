"""A model of your own, served: a GPT-like decoder that jaxserve does not know, with its own checkpoint names.

    python examples/own_model.py            random weights, made in a temporary folder
    python examples/own_model.py FOLDER     config.json, model.safetensors and tokenizer.json of yours

The engine owns the KV cache, batching and sampling; the model owns everything else. It must call the ``attend`` it is
handed once per layer, in order, and turn hidden states into logits.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve import LLM, SamplingParams, register_model


class Layer(nnx.Module):
    """Pre-norm attention and MLP; every head has its own keys and values."""

    def __init__(self, config, dtype, rngs):
        self.heads, self.dim = config.num_heads, config.head_dim
        hidden, inner, attended = config.hidden_size, config.intermediate_size, self.heads * self.dim
        kinds = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.norm1, self.norm2 = nnx.LayerNorm(hidden, **kinds), nnx.LayerNorm(hidden, **kinds)
        self.qkv = nnx.Linear(hidden, 3 * attended, use_bias=False, **kinds)
        self.out = nnx.Linear(attended, hidden, use_bias=False, **kinds)
        self.up, self.down = nnx.Linear(hidden, inner, **kinds), nnx.Linear(inner, hidden, **kinds)

    def __call__(self, index, x, attend):
        qkv = self.qkv(self.norm1(x)).reshape(-1, 3, self.heads, self.dim)
        x = x + self.out(attend(index, qkv[:, 0], qkv[:, 1], qkv[:, 2]).reshape(len(x), -1))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class OwnModel(nnx.Module):
    """Learned positions, tied head."""

    def __init__(self, config, dtype, rngs):
        kinds = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.tokens = nnx.Embed(config.vocab_size, config.hidden_size, **kinds)
        self.places = nnx.Embed(config.max_position_embeddings, config.hidden_size, **kinds)
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.LayerNorm(config.hidden_size, **kinds)

    def __call__(self, token_ids, positions, attend):
        x = self.tokens(token_ids) + self.places(positions)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, attend)
        return self.norm(x)

    def logits(self, hidden):
        return self.tokens.attend(hidden).astype(jnp.float32)


# name in the checkpoint -> name in the model, where they differ
NAMES = {
    "wte": "tokens.embedding", "wpe": "places.embedding", "h": "layers", "ln_1": "norm1", "ln_2": "norm2",
    "ln_f": "norm", "attn_in": "qkv", "attn_out": "out", "fc": "up", "proj": "down",
    "w": "kernel", "b": "bias", "g": "scale",
}  # fmt: skip


def weight_map(config, tensors):
    """``h.0.fc.w`` is ``layers.0.up.kernel``, and so on."""
    for name in tensors:
        yield ".".join(NAMES.get(part, part) for part in name.split(".")), tensors[name]


register_model("OwnModel", OwnModel, weight_map)


def main(folder: Path) -> list[int]:
    with LLM(str(folder), max_running_requests=1, skip_warmup=True) as llm:
        [output] = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    print(output.outputs[0].token_ids)
    return output.outputs[0].token_ids


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        from own_model_checkpoint import write_checkpoint

        with tempfile.TemporaryDirectory() as temporary:
            main(write_checkpoint(Path(temporary)))
