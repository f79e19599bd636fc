"""What the ``config.json`` of a MiMo-V2-Flash says beyond the common keys, in the spelling of either publisher.

The published file has ``hybrid_layer_pattern``, ``moe_layer_freq`` and ``swa_*`` keys; transformers writes
``layer_types``, ``mlp_layer_types`` and ``rope_parameters`` by kind. Keys that are missing have transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.config import given, required

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DENSE, _SPARSE = "dense", "sparse"
_THETAS = {_FULL: ("rope_theta", 5_000_000.0), _SLIDING: ("swa_rope_theta", 10_000.0)}
_SINKS = {_FULL: ("add_full_attention_sink_bias", False), _SLIDING: ("add_swa_attention_sink_bias", True)}
_ROTARY_FACTOR = 0.334
# Keys of other models' routers, and the only value that means what this one computes.
_FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_REFUSED_IF_SET = ("n_shared_experts", "use_qk_norm")


@dataclass(frozen=True)
class AttentionKind:
    """Attention of one kind of layer.

    Attributes:
        num_kv_heads: of keys and values.
        rope_theta: base of the rotary frequencies.
        rotary_dim: leading features of each head that rotate; the others stay.
        window: tokens a query sees, itself included, or None for all.
        has_sinks: whether each query head has an attention sink.
    """

    num_kv_heads: int
    rope_theta: float
    rotary_dim: int
    window: int | None
    has_sinks: bool


@dataclass(frozen=True)
class Routing:
    """How experts are chosen.

    Attributes:
        num_experts / num_chosen: all of them / per token.
        num_groups / num_groups_chosen: experts form equal groups, and only those of the best groups can be chosen.
        normalize: whether the weights of a token's experts are divided by their sum.
        scale: factor on the weights.
    """

    num_experts: int
    num_chosen: int
    num_groups: int
    num_groups_chosen: int
    normalize: bool
    scale: float


@dataclass(frozen=True)
class MiMoV2Config:
    """The parts of the configuration that only this architecture has.

    Attributes:
        layers: attention of each layer.
        is_sparse: per layer, whether its MLP is a mixture of experts.
        sliding: attention of the sliding kind, which MTP layers have too.
        head_dim / v_head_dim: of queries and keys / of values.
        value_scale: factor on the values.
        expert_size: inner width of an expert.
        routing: how experts are chosen.
    """

    layers: tuple[AttentionKind, ...]
    is_sparse: tuple[bool, ...]
    sliding: AttentionKind
    head_dim: int
    v_head_dim: int
    value_scale: float
    expert_size: int
    routing: Routing

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> MiMoV2Config:
        """Reads ``config.json``.

        Raises:
            ModelLoadError: a contradiction, or a value that means something else than this engine computes; names it.
        """
        for key, value in _FIXED.items():
            if config.get(key) not in (None, value):
                raise ModelLoadError(f"{source}: {key} {config[key]!r} is not supported; supported: {value}")
        for key in _REFUSED_IF_SET:
            if config.get(key):
                raise ModelLoadError(f"{source}: {key} is not supported, got {config[key]!r}")
        num_layers = required(config, "num_hidden_layers", source)
        num_heads = required(config, "num_attention_heads", source)
        head_dim, v_head_dim = given(config, "head_dim", 192), given(config, "v_head_dim", 128)
        same = {"swa_num_attention_heads": num_heads, "swa_head_dim": head_dim, "swa_v_head_dim": v_head_dim}
        for key, value in same.items():
            if config.get(key) not in (None, value):
                raise ModelLoadError(f"{source}: {key} must be that of the other layers, {value}, got {config[key]!r}")
        kinds = {kind: _attention(config, kind, head_dim, source) for kind in (_FULL, _SLIDING)}
        counts = [kind.num_kv_heads for kind in kinds.values()]
        if max(counts) % min(counts) or num_heads % max(counts):
            raise ModelLoadError(
                f"{source}: {num_heads} query heads and {counts[0]} (full) and {counts[1]} (sliding) KV heads: "
                "each must be a multiple of the smaller ones"
            )
        value_scale = config.get("attention_value_scale", 0.707)
        layers = _of_layers(config, ("layer_types", "hybrid_layer_pattern"), (_FULL, _SLIDING), num_layers, source)
        if layers is None:
            layers = [_FULL if i == 0 or (i + 1) % 6 == 0 else _SLIDING for i in range(num_layers)]
        mlps = _of_layers(config, ("mlp_layer_types", "moe_layer_freq"), (_DENSE, _SPARSE), num_layers, source)
        if mlps is None:
            mlps = [_DENSE] + [_SPARSE] * (num_layers - 1)
        return cls(
            layers=tuple(kinds[kind] for kind in layers),
            is_sparse=tuple(mlp == _SPARSE for mlp in mlps),
            sliding=kinds[_SLIDING],
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            value_scale=1.0 if value_scale is None else float(value_scale),
            expert_size=given(config, "moe_intermediate_size", 2048),
            routing=_routing(config, source),
        )


def read_mimo_v2_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Fields of ``ModelConfig``: those of the KV pool fit the largest kind of layer.

    Raises:
        ModelLoadError: as ``MiMoV2Config.from_hf``.
    """
    own = MiMoV2Config.from_hf(config, source)
    return {
        "rms_norm_eps": float(given(config, "rms_norm_eps", given(config, "layernorm_epsilon", 1e-5))),
        "rope_theta": own.layers[0].rope_theta,
        "rope_scaling": None,
        "num_kv_heads": max(kind.num_kv_heads for kind in own.layers),
        "head_dim": max(own.head_dim, own.v_head_dim),
        "attention_windows": tuple(kind.window for kind in own.layers),
        "attention_sinks": any(kind.has_sinks for kind in own.layers),
    }


def _attention(config: Mapping[str, Any], kind: str, head_dim: int, source: str) -> AttentionKind:
    theta_key, default_theta = _THETAS[kind]
    sinks_key, default_sinks = _SINKS[kind]
    num_kv_heads, window = given(config, "num_key_value_heads", 4), None
    if kind == _SLIDING:
        num_kv_heads = given(config, "swa_num_key_value_heads", 2 * num_kv_heads)
        # ``sliding_window_size`` counts the tokens before the query; the query sees itself besides.
        before = config.get("sliding_window_size")
        window = given(config, "sliding_window", 129) if before is None else before + 1
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ModelLoadError(f"{source}: sliding_window must be an integer >= 1, got {window!r}")
    rope = (config.get("rope_parameters") or {}).get(kind) or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise ModelLoadError(f"{source}: rope type {rope_type!r} of {kind} is not supported; supported: default")
    factor = given(rope, "partial_rotary_factor", given(config, "partial_rotary_factor", _ROTARY_FACTOR))
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelLoadError(
            f"{source}: partial_rotary_factor {factor} of head_dim {head_dim} must give an even number of features "
            f"that rotate, got {rotary_dim}"
        )
    return AttentionKind(
        num_kv_heads=num_kv_heads,
        rope_theta=float(given(rope, "rope_theta", given(config, theta_key, default_theta))),
        rotary_dim=rotary_dim,
        window=window,
        has_sinks=bool(given(config, sinks_key, default_sinks)),
    )


def _routing(config: Mapping[str, Any], source: str) -> Routing:
    routing = Routing(
        num_experts=given(config, "n_routed_experts", given(config, "num_local_experts", 256)),
        num_chosen=given(config, "num_experts_per_tok", 8),
        num_groups=given(config, "n_group", 1),
        num_groups_chosen=given(config, "topk_group", 1),
        normalize=bool(given(config, "norm_topk_prob", True)),
        scale=float(given(config, "routed_scaling_factor", 1.0)),
    )
    group_size, rest = divmod(routing.num_experts, routing.num_groups)
    if rest or group_size < 2:  # a group is judged by its two best experts
        raise ModelLoadError(
            f"{source}: n_routed_experts ({routing.num_experts}) must make n_group ({routing.num_groups}) equal groups "
            "of at least two"
        )
    if not 1 <= routing.num_groups_chosen <= routing.num_groups:
        raise ModelLoadError(f"{source}: topk_group must be 1 .. {routing.num_groups}, got {routing.num_groups_chosen}")
    most = group_size * routing.num_groups_chosen
    if not 1 <= routing.num_chosen <= most:
        raise ModelLoadError(f"{source}: num_experts_per_tok must be 1 .. {most}, got {routing.num_chosen}")
    return routing


def _of_layers(
    config: Mapping[str, Any], keys: tuple[str, str], kinds: tuple[str, str], num_layers: int, source: str
) -> list[str] | None:
    """Kind of each layer: by name under the first key, or by 0 and 1 under the second; None when neither is there."""
    names, flags = (config.get(key) for key in keys)
    if names is None and flags is None:
        return None
    if names is not None:
        key, found = keys[0], list(names)
    else:
        key, found = keys[1], [kinds[flag] if flag in (0, 1) else flag for flag in flags or ()]
    if len(found) != num_layers:
        raise ModelLoadError(f"{source}: {key} has {len(found)} entries, num_hidden_layers is {num_layers}")
    for layer, kind in enumerate(found):
        if kind not in kinds:
            raise ModelLoadError(
                f"{source}: {key} of layer {layer} is {kind!r}, which is not supported; supported: {', '.join(kinds)}"
            )
    return found
