"""Checks what a request does to logits against the model."""

from __future__ import annotations

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import MAX_HELD_STOP_IDS, SamplingParams
from jaxserve.runner.sampling_rows import stop_ids


def check_controls(params: SamplingParams, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
    """Raises InvalidRequest for an id the model does not have, or more ids to hold back than fit."""
    wrong = [token for token, _ in params.logit_bias if token >= vocab_size]
    if wrong:
        raise InvalidRequest(
            f"token ids of logit_bias must be integers in [0, {vocab_size - 1}], got {wrong[0]}",
            param="logit_bias", code="invalid_token",
        )  # fmt: skip
    held = stop_ids(params, eos_token_ids)
    if params.min_tokens and len(held) > MAX_HELD_STOP_IDS:
        raise InvalidRequest(
            f"min_tokens can hold back at most {MAX_HELD_STOP_IDS} ids, got {len(held)} in stop_token_ids and of the "
            "model's own; send fewer",
            param="stop_token_ids", code="too_many_stop_ids",
        )  # fmt: skip
