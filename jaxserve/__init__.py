"""jaxserve: an LLM serving engine for Flax models on JAX/XLA, with a fenced overlap scheduler."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxserve.attention.registry import register_attention_backend as register_attention_backend
    from jaxserve.core.sampling_params import SamplingParams as SamplingParams
    from jaxserve.engine.llm import LLM as LLM
    from jaxserve.models.registry import register_model as register_model
    from jaxserve.speculative.registry import register_speculative_algorithm as register_speculative_algorithm
    from jaxserve.text.reasoning import register_reasoning_parser as register_reasoning_parser
    from jaxserve.text.tool_calls.registry import register_tool_call_parser as register_tool_call_parser

# Loaded on first use: `jaxserve --help` must not wait for JAX.
_PUBLIC = {
    "LLM": "jaxserve.engine.llm",
    "SamplingParams": "jaxserve.core.sampling_params",
    "register_attention_backend": "jaxserve.attention.registry",
    "register_model": "jaxserve.models.registry",
    "register_reasoning_parser": "jaxserve.text.reasoning",
    "register_speculative_algorithm": "jaxserve.speculative.registry",
    "register_tool_call_parser": "jaxserve.text.tool_calls.registry",
}
__all__ = [
    "LLM", "SamplingParams", "register_attention_backend", "register_model", "register_reasoning_parser",
    "register_speculative_algorithm", "register_tool_call_parser",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
