"""How sampling parameters lie in the shared rows of a slot."""

from __future__ import annotations

import numpy as np

from jaxserve.core.sampling_params import SamplingParams

TEMPERATURE, TOP_P, MIN_P = 0, 1, 2  # columns of sampling_floats
TOP_K, SEED_LOW, SEED_HIGH, FLAGS = 0, 1, 2, 3  # columns of sampling_ints
WANTS_LOGPROBS = 1  # bit of FLAGS


def sampling_row(params: SamplingParams, seed: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows (float32[4], int32[4]) of a sequence with these parameters and this 64-bit seed."""
    # "All tokens" is one value on the device, whichever way the client wrote it.
    top_k = 0 if params.top_k <= 0 or params.top_k >= vocab_size else params.top_k
    temperature = min(params.temperature, float(np.finfo(np.float32).max))
    floats = np.array([temperature, params.top_p, params.min_p, 0.0], np.float32)
    words = np.array([seed], np.uint64).view(np.int32)
    flags = WANTS_LOGPROBS if params.logprobs is not None else 0
    return floats, np.array([top_k, words[0], words[1], flags], np.int32)
