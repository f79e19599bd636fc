"""Checks what a request does to logits against the model, and starts what constrains its outputs."""

from __future__ import annotations

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidRequest
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import MAX_HELD_STOP_IDS, SamplingParams
from jaxserve.core.token_constraint import TokenConstraint
from jaxserve.models.config import ModelConfig
from jaxserve.runner.sampling_rows import stop_ids
from jaxserve.text.grammars import Grammars
from jaxserve.text.tokenizer import Tokenizer


def make_grammars(config: EngineConfig, tokenizer: Tokenizer, model_config: ModelConfig) -> Grammars | None:
    """The grammar backend; None if there is to be none."""
    if config.grammar_backend is None:
        return None
    return Grammars(tokenizer, model_config.vocab_size, model_config.eos_token_ids)


def check_controls(
    params: SamplingParams, vocab_size: int, eos_token_ids: tuple[int, ...], grammars: Grammars | None
) -> None:
    """Raises InvalidRequest for an id the model does not have, more ids to hold back than fit, or a grammar that cannot
    be followed.
    """
    biased = [token for token, _ in params.logit_bias]
    for param, ids in (("logit_bias", biased), ("allowed_token_ids", params.allowed_token_ids or ())):
        wrong = [token for token in ids if token >= vocab_size]
        if wrong:
            raise InvalidRequest(
                f"token ids of {param} must be integers in [0, {vocab_size - 1}], got {wrong[0]}",
                param=param, code="invalid_token",
            )  # fmt: skip
    if params.limits_tokens and grammars is None:
        raise _no_backend("bad_words" if params.bad_words else "allowed_token_ids")
    held = stop_ids(params, eos_token_ids)
    if params.min_tokens and len(held) > MAX_HELD_STOP_IDS:
        raise InvalidRequest(
            f"min_tokens can hold back at most {MAX_HELD_STOP_IDS} ids, got {len(held)} in stop_token_ids and of the "
            "model's own; send fewer",
            param="stop_token_ids", code="too_many_stop_ids",
        )  # fmt: skip
    if params.structured_outputs is not None:
        if grammars is None:
            raise _no_backend(params.structured_outputs.param)
        grammars.check(params.structured_outputs)


def constraints_of(request: Request, grammars: Grammars | None) -> list[TokenConstraint | None]:
    """What constrains each of a request's outputs; its grammar has been checked.

    Raises:
        InvalidRequest: the engine has no programs with token masks.
    """
    outputs = range(request.params.n)
    if request.constraint is not None:
        if grammars is None:
            raise _no_backend(None)
        return [request.constraint() for _ in outputs]
    form = request.params.structured_outputs
    started: list[TokenConstraint | None] = [
        None if form is None or grammars is None else grammars.start(form) for _ in outputs
    ]
    if not request.params.limits_tokens:
        return started
    assert grammars is not None
    return [grammars.limited(request.params, constraint) for constraint in started]


def _no_backend(param: str | None) -> InvalidRequest:
    return InvalidRequest(
        "this engine constrains no outputs: it runs with --grammar-backend none; leave the option out", param=param,
        code="no_grammar_backend",
    )  # fmt: skip
