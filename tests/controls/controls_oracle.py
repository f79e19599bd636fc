"""What requests do to logits, said again in numpy, over logits that are recomputed for every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jax.extend.random import threefry_2x32
from oracle import full_recompute_logits

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.token_constraint import TokenConstraint
from jaxserve.models.loading.weights import LoadedModel

NUM_IDS = 260


def controlled_logits(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: SamplingParams,
    allowed: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """float32[V] -> float32[V]; ``allowed`` bool[V]."""
    logits = logits.astype(np.float32).copy()
    for token in set(prompt) | set(output):
        over = logits[token] > 0
        logits[token] = np.float32(
            logits[token] / params.repetition_penalty if over else logits[token] * params.repetition_penalty
        )
    for token in set(output):
        logits[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    for token, bias in params.logit_bias:
        logits[token] += bias
    if len(output) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    if allowed is not None:
        logits[~allowed] = -np.inf
    return logits


def _noise(seed: int, position: int, vocab: int) -> np.ndarray:
    """The random numbers of a position: jax's Threefry of the seed, with position and token as the counter."""
    half = (vocab + 1) // 2
    counter = np.concatenate([np.full(half, position), np.arange(half)]).astype(np.uint32)
    words = np.asarray(threefry_2x32(np.array([seed], np.uint64).view(np.uint32), counter))[:vocab]
    uniform = ((words >> 9).astype(np.float64) + 0.5) / 2**23
    return -np.log(-np.log(uniform))


def continued(
    loaded: LoadedModel, prompt: Sequence[int], params: SamplingParams,
    make_constraint: Callable[[], TokenConstraint] | None = None,
) -> tuple[list[int], float]:  # fmt: skip
    """The output, with its stop id, and the smallest margin of its choices."""
    output: list[int] = []
    margin = np.inf
    constraint = make_constraint() if make_constraint else None
    assert params.max_tokens is not None
    while len(output) < params.max_tokens:
        raw = full_recompute_logits(loaded, [*prompt, *output])[-1]
        allowed = None
        if constraint is not None:
            words = np.zeros((len(raw) + 31) // 32, np.uint32)
            constraint.fill_mask(words)
            allowed = np.array([words[i // 32] >> (i % 32) & 1 for i in range(len(raw))], bool)
        logits = controlled_logits(raw, prompt, output, params, allowed)
        if params.temperature:
            assert params.seed is not None and not params.top_k and params.top_p == 1 and not params.min_p
            logits = logits / np.float32(params.temperature) + _noise(
                params.seed, len(prompt) + len(output), len(logits)
            )
        second, best = np.sort(logits)[-2:]
        margin = min(margin, float(best - second))
        output.append(int(logits.argmax()))
        if constraint is not None:
            assert constraint.advance(output[-1])
        if output[-1] in params.stop_token_ids:
            break
    return output, margin
