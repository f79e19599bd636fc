"""What a checkpoint says about its model, in one form for every file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.core.errors import ModelLoadError

# Rope types this engine computes; others would be silently wrong beyond the original context length.
_ROPE_FACTORS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "frequency_factors": ("factors",),
}


@dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of a decoder model.

    Attributes:
        architecture: class name as in ``config.json``, e.g. ``"LlamaForCausalLM"``; finds the model class.
        vocab_size: rows of the embedding, and of the logits.
        hidden_size / intermediate_size: width of the residual stream / of the MLP.
        num_layers / num_heads / num_kv_heads / head_dim: of the decoder; ``num_heads`` is a multiple of
            ``num_kv_heads``, and ``num_heads * head_dim`` need not equal ``hidden_size``. The KV pool is made for
            ``num_kv_heads`` and ``head_dim``; where layers differ they are the largest.
        rms_norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: ``rope_type`` and its numbers, or None for plain rotary embeddings.
        max_position_embeddings: longest sequence the model was made for.
        tie_word_embeddings: whether the logits use the embedding.
        eos_token_ids: every id that ends an output.
        bos_token_id: or None.
        attention_windows: per layer, number of tokens a query sees (itself included), or None for all.
        attention_bias / mlp_bias: whether these projections have biases.
        attention_sinks: whether any layer has attention sinks, which not every attention backend supports.
        extra: the raw configuration, for what only one architecture knows.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    attention_windows: tuple[int | None, ...] = ()
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_sinks: bool = False
    extra: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.attention_windows:
            object.__setattr__(self, "attention_windows", (None,) * self.num_layers)
        if len(self.attention_windows) != self.num_layers:
            raise ModelLoadError(
                f"config: {self.num_layers} layers need as many attention windows, got {len(self.attention_windows)}"
            )
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
        for name in (*sizes, "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelLoadError(f"config: {name} must be an integer >= 1, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"config: num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"config: head_dim must be even for rotary embeddings, got {self.head_dim}")

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        source: str = "config.json",
        own: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Reads a Hugging Face ``config.json`` (transformers 4 and 5) and ``generation_config.json``.

        End-of-sequence ids come from ``generation_config`` when it names any, else from ``config``.

        Args:
            own: fields of this class that the architecture's own reader found (``registry.read_model_config``). They
                replace what this function would read, its refusals included: whoever gives a field answers for it.

        Raises:
            ModelLoadError: a missing or contradictory key, or an unsupported rope type or activation; names it.
        """
        architectures = config.get("architectures") or []
        if len(architectures) != 1:
            raise ModelLoadError(f"{source}: architectures must name one class, got {architectures!r}")
        hidden_act = config.get("hidden_act", "silu")
        if hidden_act != "silu":
            raise ModelLoadError(f"{source}: hidden_act {hidden_act!r} is not supported; supported: silu")
        hidden_size = required(config, "hidden_size", source)
        num_heads = required(config, "num_attention_heads", source)
        num_layers = required(config, "num_hidden_layers", source)
        own = own or {}
        theta, scaling = (0.0, None) if "rope_theta" in own else _rope(config, source)
        windows = () if "attention_windows" in own else _windows(config, num_layers, source)
        eos = (generation_config or {}).get("eos_token_id")
        eos = config.get("eos_token_id") if eos is None else eos
        read = {
            "architecture": architectures[0],
            "vocab_size": required(config, "vocab_size", source),
            "hidden_size": hidden_size,
            "intermediate_size": required(config, "intermediate_size", source),
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": given(config, "num_key_value_heads", num_heads),
            "head_dim": given(config, "head_dim", hidden_size // num_heads),
            "rms_norm_eps": float(given(config, "rms_norm_eps", 1e-6)),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "max_position_embeddings": given(config, "max_position_embeddings", 2048),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            "eos_token_ids": _token_ids(eos, source),
            "bos_token_id": config.get("bos_token_id"),
            "attention_windows": windows,
            "attention_bias": bool(config.get("attention_bias", False)),
            "mlp_bias": bool(config.get("mlp_bias", False)),
            "extra": dict(config),
        }
        return cls(**{**read, **own})


def required(config: Mapping[str, Any], key: str, source: str) -> Any:
    """The value of ``key``. Raises ModelLoadError when it is missing or null."""
    if config.get(key) is None:
        raise ModelLoadError(f"{source}: key {key} is missing")
    return config[key]


def given(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of ``key``, or ``default``: older and newer files write null for "not set"."""
    return default if config.get(key) is None else config[key]


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling: ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (4)."""
    parameters = config.get("rope_parameters") or {}
    if parameters and all(isinstance(value, Mapping) for value in parameters.values()):
        kinds = list(parameters.values())
        if any(kind != kinds[0] for kind in kinds):
            raise ModelLoadError(
                f"{source}: rope_parameters differ between {', '.join(parameters)}, which is not supported"
            )
        parameters = kinds[0]
    scaling = dict(parameters or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None)
    theta = float(given(config, "rope_theta", 10000.0) if theta is None else theta)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in _ROPE_FACTORS:
        raise ModelLoadError(f"{source}: rope type {kind!r} is not supported; supported: {', '.join(_ROPE_FACTORS)}")
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ModelLoadError(f"{source}: partial_rotary_factor is not supported")
    if kind == "default":
        return theta, None
    for key in _ROPE_FACTORS[kind]:
        if scaling.get(key) is None:
            raise ModelLoadError(f"{source}: rope type {kind!r} needs {key}, which is missing")
    return theta, {"rope_type": kind, **{key: scaling[key] for key in _ROPE_FACTORS[kind]}}


def _token_ids(eos: Any, source: str) -> tuple[int, ...]:
    ids = [] if eos is None else eos if isinstance(eos, (list, tuple)) else [eos]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelLoadError(f"{source}: eos_token_id must be an integer or a list of integers, got {eos!r}")
    return tuple(dict.fromkeys(ids))


def _windows(config: Mapping[str, Any], num_layers: int, source: str) -> tuple[int | None, ...]:
    layer_types = config.get("layer_types")
    if layer_types is None:
        return (None,) * num_layers
    if len(layer_types) != num_layers:
        raise ModelLoadError(f"{source}: layer_types has {len(layer_types)} entries, num_hidden_layers is {num_layers}")
    window = config.get("sliding_window")
    windows: list[int | None] = []
    for layer, kind in enumerate(layer_types):
        if kind == "full_attention":
            windows.append(None)
        elif kind == "sliding_attention" and isinstance(window, int) and window > 0:
            windows.append(window)
        elif kind == "sliding_attention":
            raise ModelLoadError(f"{source}: layer {layer} is sliding_attention, but sliding_window is {window!r}")
        else:
            raise ModelLoadError(
                f"{source}: layer type {kind!r} of layer {layer} is not supported; "
                "supported: full_attention, sliding_attention"
            )
    return tuple(windows)
