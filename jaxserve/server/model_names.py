"""The names a client may call the model by."""

from __future__ import annotations

from jaxserve.core.errors import InvalidRequest
from jaxserve.server.engine_protocol import EngineLike


def served_name(engine: EngineLike) -> str:
    """The name that responses carry."""
    return getattr(engine.config, "served_model_name", None) or engine.model_name


def accepted_names(engine: EngineLike) -> list[str]:
    """All names, the served one first; ``default`` always works."""
    return list(dict.fromkeys([served_name(engine), engine.model_name, "default"]))


def check_model(engine: EngineLike, name: str | None) -> None:
    """A request without a model means the one there is.

    Raises:
        InvalidRequest: 404 for another model.
    """
    if name is not None and name not in accepted_names(engine):
        known = ", ".join(repr(known) for known in accepted_names(engine))
        message = f"the model {name!r} does not exist here; this server has {known}"
        raise InvalidRequest(message, param="model", code="model_not_found", status=404)
