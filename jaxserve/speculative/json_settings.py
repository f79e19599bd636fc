"""``--speculative-config``: speculation's settings as one JSON object, with the keys vLLM's users know."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from jaxserve.core.errors import ConfigError

METHODS = {
    "ngram": "NGRAM",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "draft_model": "STANDALONE",
    "dflash": "DFLASH",
    "mtp": "MTP",
}
KEYS = (
    "method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min",
    "draft_tensor_parallel_size", "token_map",
)  # fmt: skip
_NAME = "--speculative-config"


def parse_speculative_config(text: str) -> dict[str, Any]:
    """The fields of ``EngineConfig`` that a JSON object asks for.

    Raises:
        ConfigError: it is no JSON object, or see ``speculative_settings``.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f'{_NAME} must be a JSON object like \'{{"method": "ngram", "num_speculative_tokens": 4}}\' '
            f"(quoted for the shell), got {text!r}: {error}"
        ) from None
    return speculative_settings(found)


def speculative_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``EngineConfig`` that the keys ask for. A key whose value is None counts as left out.

    Raises:
        ConfigError: an unknown key or method, a value of the wrong type, or one that this engine has not.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{_NAME} must be a JSON object, got {config!r}")
    for key in config:
        if key not in KEYS:
            close = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"; did you mean {close[0]!r}" if close else ""
            raise ConfigError(f"{_NAME} knows no key {key!r}{hint}. There are {', '.join(KEYS)}; the rest has flags")
    given = {key: value for key, value in config.items() if value is not None}
    method = given.get("method")
    if not isinstance(method, str) or method.lower() not in METHODS:
        got = "nothing" if method is None else repr(method)
        raise ConfigError(f"{_NAME}: 'method' must be one of {', '.join(METHODS)}, got {got}")
    method = method.lower()
    settings: dict[str, Any] = {"speculative_algorithm": METHODS[method]}
    if "model" in given:
        if not isinstance(given["model"], str):
            raise ConfigError(f"{_NAME}: 'model' must be a path, got {given['model']!r}")
        if method == "ngram":
            raise ConfigError(f"{_NAME}: ngram drafts without a model; leave out 'model', got {given['model']!r}")
        settings["speculative_draft_model_path"] = given["model"]
    if "token_map" in given:
        if not isinstance(given["token_map"], str):
            raise ConfigError(f"{_NAME}: 'token_map' must be a path, got {given['token_map']!r}")
        settings["speculative_token_map"] = given["token_map"]
    if "num_speculative_tokens" in given:
        settings["speculative_num_draft_tokens"] = _positive(given, "num_speculative_tokens") + 1
    for key in ("prompt_lookup_max", "prompt_lookup_min"):
        if key in given and method != "ngram":
            raise ConfigError(f"{_NAME}: {key!r} is for ngram; leave it out with method {method!r}")
    if "prompt_lookup_max" in given:
        settings["speculative_ngram_max_match_window_size"] = _positive(given, "prompt_lookup_max")
    if "prompt_lookup_min" in given and _positive(given, "prompt_lookup_min") != 1:
        raise ConfigError(
            f"{_NAME}: 'prompt_lookup_min' must be 1 or left out, got {given['prompt_lookup_min']}: a match of one "
            "token is looked up too, and whether drafts hold decides how many are verified"
        )
    if "draft_tensor_parallel_size" in given and _positive(given, "draft_tensor_parallel_size") != 1:
        raise ConfigError(
            f"{_NAME}: 'draft_tensor_parallel_size' must be 1 or left out, got {given['draft_tensor_parallel_size']}: "
            "an engine runs on one device"
        )
    return settings


def merged(settings: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Settings given by flags, by field of ``EngineConfig``, together with those of ``--speculative-config``.

    Raises:
        ConfigError: both name a field, with different values.
    """
    for name, value in asked.items():
        other = settings.get(name, value)
        if _comparable(other) != _comparable(value):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{_NAME} means {flag} {value}, but {flag} is {other}; give one of them")
    return {**settings, **asked}


def _comparable(value: Any) -> Any:
    return value.upper() if isinstance(value, str) and value.upper() in METHODS.values() else value


def _positive(given: Mapping[str, Any], key: str) -> int:
    value = given[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{_NAME}: {key!r} must be an integer of at least 1, got {value!r}")
    return value
