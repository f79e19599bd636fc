"""How sampling parameters lie in the shared rows of a slot."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.barrier.shared_rows import NUM_SAMPLING_FLOATS, NUM_SAMPLING_INTS
from jaxserve.core.sampling_params import MAX_HELD_STOP_IDS, MAX_LOGIT_BIAS, SamplingParams

TEMPERATURE, TOP_P, MIN_P, FREQUENCY, PRESENCE, REPETITION = range(6)  # columns of sampling_floats
TOP_K, SEED_LOW, SEED_HIGH, FLAGS, MIN_LENGTH = range(5)  # columns of sampling_ints
WANTS_LOGPROBS, HAS_PENALTIES, HAS_BIAS, HAS_MIN_TOKENS = 1, 2, 4, 8  # bits of FLAGS
CONTROLS = HAS_PENALTIES | HAS_BIAS | HAS_MIN_TOKENS  # those that change logits
NO_ID = 2**31 - 1  # fills up bias_ids


class BiasRow(NamedTuple):
    """The bias rows of a slot: ids int32[364] and values float32[300]."""

    ids: np.ndarray
    values: np.ndarray


def sampling_row(
    params: SamplingParams, seed: int, vocab_size: int, prompt_len: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The rows (float32[8], int32[8]) of a sequence with these parameters and this 64-bit seed."""
    # "All tokens" is one value on the device, whichever way the client wrote it.
    top_k = 0 if params.top_k <= 0 or params.top_k >= vocab_size else params.top_k
    floats = np.zeros(NUM_SAMPLING_FLOATS, np.float32)
    floats[TEMPERATURE] = min(params.temperature, float(np.finfo(np.float32).max))
    floats[TOP_P], floats[MIN_P] = params.top_p, params.min_p
    floats[FREQUENCY], floats[PRESENCE] = params.frequency_penalty, params.presence_penalty
    floats[REPETITION] = params.repetition_penalty
    ints = np.zeros(NUM_SAMPLING_INTS, np.int32)
    ints[TOP_K] = top_k
    ints[[SEED_LOW, SEED_HIGH]] = np.array([seed], np.uint64).view(np.int32)
    for flag, is_set in (
        (WANTS_LOGPROBS, params.logprobs is not None),
        (HAS_PENALTIES, params.has_penalties),
        (HAS_BIAS, params.logit_bias),
        (HAS_MIN_TOKENS, params.min_tokens),
    ):
        ints[FLAGS] |= flag if is_set else 0
    ints[MIN_LENGTH] = prompt_len + params.min_tokens
    return floats, ints


def stop_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that end an output, each once."""
    ends = params.structured_outputs is not None or not params.ignore_eos
    return tuple(dict.fromkeys((*params.stop_token_ids, *(eos_token_ids if ends else ()))))


def bias_row(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> BiasRow | None:
    """The bias rows of a sequence; None if it needs none, and whatever stands in its slot does no harm."""
    if not params.logit_bias and not params.min_tokens:
        return None
    ids = np.full(MAX_LOGIT_BIAS + MAX_HELD_STOP_IDS, NO_ID, np.int32)
    values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    if params.logit_bias:
        ids[: len(params.logit_bias)], values[: len(params.logit_bias)] = zip(*params.logit_bias, strict=True)
    if params.min_tokens:
        held = stop_ids(params, eos_token_ids)
        ids[MAX_LOGIT_BIAS : MAX_LOGIT_BIAS + len(held)] = held
    return BiasRow(ids, values)
