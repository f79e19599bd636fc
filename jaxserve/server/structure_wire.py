"""The form of an output, by the names of the OpenAI API and of vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.structured_outputs import StructuredOutputs
from jaxserve.server.engine_protocol import EngineLike

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def structured_outputs(fields: dict[str, Any]) -> StructuredOutputs | None:
    """What ``response_format``, ``structured_outputs`` and ``guided_*`` ask for; null counts as absent.

    Raises:
        InvalidRequest: several of them, or something they do not allow.
    """
    found: list[StructuredOutputs] = []
    if (wanted := fields.get("response_format")) is not None:
        found += [form for form in [_response_format(wanted)] if form is not None]
    if (wanted := fields.get("structured_outputs")) is not None:
        found.append(StructuredOutputs.of(wanted))
    for name, kind in GUIDED.items():
        if (wanted := fields.get(name)) is not None:
            found.append(StructuredOutputs.of({kind: wanted}, param=name))
    if len(found) > 1:
        names = " and ".join(form.param for form in found)
        message = f"{names} both say what the output must look like; send one of them"
        raise InvalidRequest(message, param=found[1].param, code="invalid_value")
    return found[0] if found else None


def _response_format(value: Any) -> StructuredOutputs | None:
    param = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text" and set(value) == {"type"}:
        return None
    if kind == "json_object" and set(value) == {"type"}:
        return StructuredOutputs(json_object=True, param=param)
    if kind == "json_schema" and set(value) == {"type", "json_schema"}:
        inner = value["json_schema"]
        if isinstance(inner, dict) and set(inner) <= {"name", "description", "schema", "strict"}:
            # Always strict: a schema that is followed now and then would be of no use.
            return StructuredOutputs(json=inner.get("schema") or {}, param=param)
    raise InvalidRequest(
        'response_format must be {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": '
        f'{{"name": "...", "schema": {{...}}}}}}, got {value!r}', param=param, code="invalid_value",
    )  # fmt: skip


async def compile_grammar(engine: EngineLike, params: SamplingParams) -> None:
    """Has the grammar of a request compiled without holding up the event loop. Raises InvalidRequest."""
    if params.structured_outputs is not None:
        await asyncio.to_thread(engine.check_controls, params)
