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
    if form is None:
        return [None for _ in outputs]
    assert grammars is not None
    return [grammars.start(form) for _ in outputs]


def _no_backend(param: str | None) -> InvalidRequest:
    return InvalidRequest(
        "this engine constrains no outputs: it runs with --grammar-backend none; leave the option out", param=param,
        code="no_grammar_backend",
    )  # fmt: skip
