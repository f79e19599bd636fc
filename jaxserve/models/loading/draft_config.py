"""``config.json`` of a draft checkpoint: read into a ``DraftConfig``, checked against the target, and written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.dflash import default_target_layers
from jaxserve.models.draft import FINAL, DraftConfig
from jaxserve.models.eagle3 import default_feature_points
from jaxserve.models.loading.draft_files import DraftFiles

TRAINED_STEPS = "speculative_num_steps"  # key of config.json
ARCHITECTURES = {"EAGLE": "LlamaForCausalLMEagle", "EAGLE3": "LlamaForCausalLMEagle3", "DFLASH": "DFlashDraftModel"}


def read_draft_config(files: DraftFiles, target: ModelConfig) -> DraftConfig:
    """What ``config.json`` and the tensors' names say, without ``own`` and ``tied_head``, which depend on the arrays.

    Raises:
        ModelLoadError: a key that is missing, unsupported or does not fit the target; says what was wanted and what
            came.
    """
    source = str(files.path / "config.json")
    # The class name says little (authors write the target's, too); the kind is known from the tensors.
    config = {**files.config, "architectures": [ARCHITECTURES[files.kind]]}
    if config.get("vocab_size") is None:
        config["vocab_size"] = target.vocab_size
    decoder = ModelConfig.from_hf(config, source=source)
    if decoder.vocab_size != target.vocab_size:
        raise ModelLoadError(
            f"{source}: vocab_size is {decoder.vocab_size}, the target's is {target.vocab_size}; "
            "a draft works only with the target it was trained for: give another draft or another target"
        )
    if decoder.mlp_bias:
        raise ModelLoadError(f"{source}: mlp_bias is not supported for draft models")
    draft_vocab = files.config.get("draft_vocab_size") or decoder.vocab_size
    return _READERS[files.kind](files, source, decoder, target, draft_vocab)


def _eagle(files: DraftFiles, source: str, decoder: ModelConfig, target: ModelConfig, draft_vocab: int) -> DraftConfig:
    _same_width(source, decoder, target)
    return DraftConfig("EAGLE", decoder, target.hidden_size, (FINAL,), draft_vocab, fc_bias="fc.bias" in files.tensors)


def _eagle3(files: DraftFiles, source: str, decoder: ModelConfig, target: ModelConfig, draft_vocab: int) -> DraftConfig:
    config = files.config
    _refuse_keys(source, config, ("norm_before_fc", "fc_norm", "parallel_drafting"))
    wanted = config.get("target_hidden_size") or decoder.hidden_size
    if wanted != target.hidden_size:
        raise ModelLoadError(
            f"{source}: trained for a target of hidden size {wanted}, this target's is {target.hidden_size}; "
            "a draft works only with the target it was trained for: give another draft or another target"
        )
    inner = config.get("eagle_config") or {}
    if inner.get("use_aux_hidden_state", True) is False:
        raise ModelLoadError(
            f"{source}: eagle_config.use_aux_hidden_state false is not supported; wanted an EAGLE-3 head that reads "
            "several layers of the target"
        )
    if ids := config.get("eagle_aux_hidden_state_layer_ids"):
        points = tuple(ids)  # speculators: the layers that would read these states
    elif ids := inner.get("eagle_aux_hidden_state_layer_ids"):
        points = tuple(i + 1 for i in ids)  # SGLang: the layers that wrote them
    else:
        points = default_feature_points(target.num_layers)
    _check_points(source, points, target)
    return DraftConfig(
        "EAGLE3",
        decoder,
        target.hidden_size,
        points,
        draft_vocab,
        fc_bias="fc.bias" in files.tensors,
        # A speculators config that leaves the key out means true; others mean false.
        norm_before_residual=bool(config.get("norm_before_residual", files.speculators)),
    )


def _dflash(files: DraftFiles, source: str, decoder: ModelConfig, target: ModelConfig, draft_vocab: int) -> DraftConfig:
    config = files.config
    inner = config.get("dflash_config") or {}
    _same_width(source, decoder, target)
    causal = config.get("is_causal")
    if causal or (causal is None and any(window is not None for window in decoder.attention_windows)):
        raise ModelLoadError(
            f"{source}: blocks whose rows see only earlier rows (is_causal, or sliding_attention "
            "without is_causal false) "
            "are not supported; wanted full_attention layers"
        )
    layers = inner.get("target_layer_ids") or config.get("aux_hidden_state_layer_ids")
    if layers is None:
        layers = default_target_layers(target.num_layers, decoder.num_layers)
    # The last layer's state is the one behind the final norm, as in transformers' hidden_states.
    points = tuple(FINAL if i == target.num_layers - 1 else i + 1 for i in layers)
    _check_points(source, points, target)
    block_size = block_size_of(files)
    mask = inner.get("mask_token_id", config.get("mask_token_id"))
    if not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        raise ModelLoadError(
            f"{source}: dflash_config.mask_token_id must be one of the target's {target.vocab_size} "
            f"token ids, got {mask!r}"
        )
    return DraftConfig(
        "DFLASH", decoder, target.hidden_size, points, draft_vocab, block_size=block_size, mask_token_id=mask
    )


_READERS: dict[str, Callable[..., DraftConfig]] = {"EAGLE": _eagle, "EAGLE3": _eagle3, "DFLASH": _dflash}


def block_size_of(files: DraftFiles) -> int:
    """Tokens of a DFLASH block, the newest known one included.

    Raises:
        ModelLoadError: ``config.json`` does not say it.
    """
    inner = files.config.get("dflash_config") or {}
    block_size = inner.get("block_size") or files.config.get("block_size")
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 2:
        source = files.path / "config.json"
        raise ModelLoadError(f"{source}: block_size must be an integer >= 2, got {block_size!r}")
    return block_size


def trained_steps_of(files: DraftFiles) -> int | None:
    """Guesses in a row a head was trained for, where its configuration says it: ours, or *speculators*'.

    Raises:
        ModelLoadError: it says something else than an integer in 1 .. 63.
    """
    methods = (files.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    steps = files.config.get(TRAINED_STEPS, methods[0].get("speculative_tokens"))
    if steps is None:
        return None
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 63:
        source = files.path / "config.json"
        raise ModelLoadError(f"{source}: guesses in a row must be an integer in 1 .. 63, got {steps!r}")
    return steps


def write_draft_config(draft: DraftConfig) -> dict[str, Any]:
    """``config.json`` in the published layout of the draft's algorithm."""
    decoder = draft.decoder
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[draft.algorithm]],
        "model_type": "qwen3" if draft.algorithm == "DFLASH" else "llama",
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": decoder.rms_norm_eps,
        "rope_theta": decoder.rope_theta,
        "rope_scaling": decoder.rope_scaling,
        "max_position_embeddings": decoder.max_position_embeddings,
        "attention_bias": decoder.attention_bias,
        "tie_word_embeddings": False,
    }
    if draft.draft_vocab_size != decoder.vocab_size:
        config["draft_vocab_size"] = draft.draft_vocab_size
    if draft.algorithm == "EAGLE":
        config["bias"] = draft.fc_bias
    elif draft.algorithm == "EAGLE3":
        config["draft_vocab_size"] = draft.draft_vocab_size
        config["target_hidden_size"] = draft.target_hidden_size
        config["norm_before_residual"] = draft.norm_before_residual
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [point - 1 for point in draft.feature_points],
        }
    else:
        num_target_layers = decoder.extra["num_target_layers"]
        config["num_target_layers"] = num_target_layers
        config["block_size"] = draft.block_size
        layers = [num_target_layers - 1 if point == FINAL else point - 1 for point in draft.feature_points]
        config["dflash_config"] = {"target_layer_ids": layers, "mask_token_id": draft.mask_token_id}
    return config


def _same_width(source: str, decoder: ModelConfig, target: ModelConfig) -> None:
    if decoder.hidden_size != target.hidden_size:
        raise ModelLoadError(
            f"{source}: hidden_size is {decoder.hidden_size}, the target's is {target.hidden_size}; "
            "a draft works only with the target it was trained for: give another draft or another target"
        )


def _check_points(source: str, points: tuple[int, ...], target: ModelConfig) -> None:
    for point in points:
        if not isinstance(point, int) or not (point == FINAL or 0 <= point <= target.num_layers):
            raise ModelLoadError(
                f"{source}: wants hidden states of layer {point - 1}, the target's layers are 0 .. "
                f"{target.num_layers - 1}; "
                "a draft works only with the target it was trained for: give another draft or another target"
            )


def _refuse_keys(source: str, config: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        if config.get(key):
            raise ModelLoadError(f"{source}: {key} is not supported")
