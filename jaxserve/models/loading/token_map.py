"""Token maps: the target ids an EAGLE head may draft, so that its logits are computed for these alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxserve.core.errors import ConfigError, ModelLoadError
from jaxserve.models.loading.weights import LoadedModel, abstract_parameters

_FLAG = "--speculative-token-map"
TOKEN_MAP_FILE = "token_map.json"  # of a trained EAGLE head, beside its checkpoint
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")
_FORMS = "a .json file with a list of ids, or a .npy or .safetensors file with one array of integers"


def read_token_map(path: str | Path) -> np.ndarray:
    """The ids of a token map, int64[n], rising; their order in the file means nothing.

    Raises:
        ConfigError: no such file, another kind of file, or one that holds anything else than different integers >= 0.
    """
    path = Path(path).expanduser()
    kind = path.suffix.lower()
    if kind in _TORCH_SUFFIXES:
        convert = f"import json, torch; json.dump(torch.load('{path.name}').tolist(), open('{path.stem}.json', 'w'))"
        raise ConfigError(
            f"{_FLAG} {path}: files of torch are not read, as that takes torch; wanted {_FORMS}. Where torch is "
            f'installed, this makes one of it: python -c "{convert}"'
        )
    readers = {".json": _from_json, ".npy": _from_npy, ".safetensors": _from_safetensors}
    if kind not in readers:
        raise ConfigError(f"{_FLAG} {path}: wanted {_FORMS}, got {kind or 'no suffix'}")
    try:
        found = readers[kind](path)
    except OSError as error:
        raise ConfigError(f"{_FLAG} {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, SafetensorError) as error:
        raise ConfigError(f"{_FLAG} {path}: damaged, or no token map: {error}; wanted {_FORMS}") from error
    return _checked(path, found)


def _from_json(path: Path) -> np.ndarray:
    found = json.loads(path.read_bytes())
    # Not left to numpy: it makes numbers of booleans, and floats of a list with one float.
    if not isinstance(found, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in found):
        raise ValueError("it is no list of integers")
    return np.array(found, object if any(abs(i) >= 2**63 for i in found) else np.int64)


def _from_npy(path: Path) -> np.ndarray:
    found = np.load(path, allow_pickle=False)
    if not isinstance(found, np.ndarray):
        raise ValueError("it is an archive of arrays")
    return found


def _from_safetensors(path: Path) -> np.ndarray:
    tensors = load_file(path)
    if len(tensors) != 1:
        raise ValueError(f"it holds {len(tensors)} tensors ({', '.join(sorted(tensors)[:5])})")
    return next(iter(tensors.values()))


def _checked(path: Path, ids: np.ndarray) -> np.ndarray:
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"{_FLAG} {path}: wanted one row of integers, got {ids.dtype} of shape {list(ids.shape)}")
    if not ids.size:
        raise ConfigError(f"{_FLAG} {path}: names no id; a draft needs some to choose from")
    rising = np.sort(ids.astype(np.int64))
    if rising[0] < 0:
        raise ConfigError(f"{_FLAG} {path}: ids must be >= 0, got {rising[0]}")
    twice = rising[1:][np.diff(rising) == 0]
    if twice.size:
        raise ConfigError(f"{_FLAG} {path}: ids must be different, but {twice[0]} comes more than once")
    return rising


def check_range(path: str | Path, ids: np.ndarray, num_ids: int) -> None:
    """Raises ConfigError if an id is not below ``num_ids``, what the target's tokenizer knows."""
    if ids[-1] >= num_ids:
        outside = int(np.count_nonzero(ids >= num_ids))
        raise ConfigError(
            f"{_FLAG} {path}: ids must be in 0 .. {num_ids - 1}, what the target's tokenizer knows, but {outside} are "
            f"not, the largest {ids[-1]}; it was made for another tokenizer"
        )


def with_token_map(draft: LoadedModel, ids: np.ndarray) -> LoadedModel:
    """The head with its logits cut to ``ids`` int64[n], rising; the same one where these are all there are.

    Its LM head becomes an array of its own, the rows of the one it had. Works on shapes alone, too.

    Raises:
        ModelLoadError: the head has a vocabulary of its own already.
    """
    module: Any = draft.bind(draft.leaves)
    if module.target_ids is not None:
        raise ModelLoadError(
            f"the head knows {module.draft_vocab_size} of the target's {draft.config.vocab_size} ids, by its tensor "
            f"d2t; leave out {_FLAG}"
        )
    if ids.size == draft.config.vocab_size:
        return draft
    config = dataclasses.replace(module.draft, draft_vocab_size=int(ids.size), tied_head=False)
    fc = draft.leaf("fc")
    assert fc is not None
    graphdef, treedef, wanted = abstract_parameters(type(module), config, fc.dtype)
    whole = draft.leaf("embed_tokens" if module.draft.tied_head else "lm_head")
    assert whole is not None
    found: dict[str, Any] = dict(zip(draft.paths, draft.leaves, strict=True))
    if isinstance(whole, jax.ShapeDtypeStruct):
        found |= {name: wanted[name] for name in ("lm_head", "target_ids")}
    else:
        found |= {"lm_head": whole[ids], "target_ids": jnp.asarray(ids, jnp.int32)}
    return LoadedModel(graphdef, treedef, [found[path] for path in wanted], draft.config)
