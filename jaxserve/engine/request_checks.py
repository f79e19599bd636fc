"""Checks a request against the settings, the model and the pool, before it is queued."""

from __future__ import annotations

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.shapes import ceil_div
from jaxserve.engine.assembly import EngineParts

MAX_PRIORITY = 2**31 - 1


def check_request(
    prompt_ids: list[int], params: SamplingParams, priority: int, config: EngineConfig, parts: EngineParts
) -> int:
    """The most tokens each output of a request may have in all.

    Raises:
        InvalidRequest: what was wanted, what came, what to do.
    """
    vocab, limit = parts.model.config.vocab_size, parts.context_length
    if not prompt_ids:
        raise InvalidRequest("the prompt has no tokens; send at least one", param="prompt", code="empty_prompt")
    for param, ids in (("prompt", prompt_ids), ("stop_token_ids", params.stop_token_ids)):
        wrong = [t for t in ids if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab]
        if wrong:
            raise InvalidRequest(
                f"token ids of {param} must be integers in [0, {vocab - 1}], got {wrong[0]!r}",
                param=param, code="invalid_token",
            )  # fmt: skip
    _check_priority(config, priority)
    most = config.max_running_requests + config.max_queued_requests
    if params.n > most:
        raise InvalidRequest(
            f"n is {params.n}, but this server holds {most} sequences "
            "(--max-running-requests + --max-queued-requests); ask for fewer",
            param="n", code="too_many_outputs",
        )  # fmt: skip
    length = len(prompt_ids)
    wanted = length + (1 if params.max_tokens is None else params.max_tokens)
    if wanted > limit:
        raise InvalidRequest(
            f"the prompt has {length} tokens and asks for {wanted - length} more, {wanted} in all; this model's "
            f"context length is {limit}. Shorten the prompt or lower max_tokens",
            param="max_tokens" if length < limit else "prompt", code="context_length_exceeded",
        )  # fmt: skip
    pool = parts.scheduler.pool
    pool_tokens = pool.num_usable * pool.page_size
    if wanted > pool_tokens:
        needed, pages = ceil_div(wanted, pool.page_size), pool.num_usable
        raise InvalidRequest(
            f"the request needs {needed} pages, the pool has {pages}; raise --num-pages or ask for fewer tokens",
            param="max_tokens", code="pool_too_small",
        )  # fmt: skip
    return min(limit, pool_tokens) if params.max_tokens is None else wanted


def _check_priority(config: EngineConfig, priority: int) -> None:
    """Raises InvalidRequest for a priority that is no integer, or that nobody would look at."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got {priority!r}",
            param="priority", code="invalid_value",
        )  # fmt: skip
    if priority and config.schedule_policy != "priority":
        raise InvalidRequest(
            "this server serves first come, first served; leave out priority, or start it with "
            f"--schedule-policy priority, got priority={priority}",
            param="priority", code="unsupported_field",
        )  # fmt: skip
