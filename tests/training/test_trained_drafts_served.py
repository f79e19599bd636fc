"""Training and serving run the same draft: what is unrolled is what is drafted, and what was trained is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_engine, run, workload
from oracle import full_attention
from tiny import write_tiny
from walk import MIMO

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.models.draft import FINAL
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import init_draft, save_draft
from jaxserve.models.loading.mtp import load_mtp_layers
from jaxserve.models.loading.weights import LoadedModel, load_model
from jaxserve.training.continuations import Sample
from jaxserve.training.losses import Batch, chain_outputs, layer_outputs
from jaxserve.training.packing import pack

NUM_STEPS = 3
LENGTH = 48


def drafts_behind(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Serves some requests; the tokens of a sequence and what is drafted behind them, after every step."""
    found = []
    prompts = [*workload()[1:5], ([7], 9), ([8, 9], 9)]
    for number, (prompt, length) in enumerate(prompts):
        params = SamplingParams(max_tokens=min(length, 12), ignore_eos=True, temperature=0.0)
        engine.add(Request(str(number), tuple(prompt), params))
    while engine.has_work:
        engine.step()
        relay = np.asarray(engine.parts.worker.draft_runner.drafted)
        for sequence in engine.scheduler.running:
            if sequence.slot is not None and not sequence.prefilling and not sequence.num_in_flight:
                drafts = relay[sequence.slot, : sequence.num_drafts].tolist()
                found.append((list(sequence.token_ids), drafts))
    return found


def states_of(target: LoadedModel, points: tuple[int, ...]) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Of a row of tokens the captured states and the final one, computed without cache."""
    attend = full_attention(target.config.attention_windows)

    @jax.jit
    def states(token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen: dict[int, jax.Array] = {}
        seen[FINAL] = target.bind(target.leaves)(token_ids, jnp.arange(LENGTH), attend, seen.__setitem__)
        return jnp.concatenate([seen[point] for point in points], axis=1), seen[FINAL]

    return states


def compare(
    engine: Engine, target: LoadedModel, points: tuple[int, ...], outputs_of: Callable[[Batch], list[jax.Array]],
    logits: Callable[[int, jax.Array], jax.Array],
) -> list[int]:  # fmt: skip
    """Every draft must be the best of what training makes of the tokens with the drafts behind them: there the text's
    tokens *are* the drafts. Returns how many were compared per step."""
    try:
        served = drafts_behind(engine)
    finally:
        engine.close()
    compared, states = [0] * NUM_STEPS, states_of(target, points)
    for tokens, drafts in served:
        rows = pack([Sample(tokens + drafts, 0)], LENGTH)
        arrays = (rows.ids, rows.segments, rows.positions, rows.answers, *(x[None] for x in states(rows.ids[0])))
        outputs = outputs_of(Batch(*(jnp.asarray(array) for array in (*arrays, rows.ids))))
        for step, drafted in enumerate(drafts):
            scores = np.asarray(logits(step, outputs[step][0, len(tokens) - 2]))
            second, best = np.argsort(scores)[-2:]
            if scores[best] - scores[second] < 1e-3:
                break  # rounding may decide, and all that follows depends on it
            assert drafted == best, f"draft {step} behind {len(tokens)} tokens"
            compared[step] += 1
    return compared


def test_unrolled_eagle_is_what_is_drafted(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    target = load_model(open_checkpoint(model), jnp.float32)
    head = init_draft("EAGLE", target, jnp.float32, seed=3)
    head.leaves[:] = [leaf * 12 if "proj" in path else leaf for path, leaf in zip(head.paths, head.leaves, strict=True)]
    save_draft(tmp_path / "eagle", head)
    draft: Any = head.bind(head.leaves)
    engine = make_engine(
        model, speculative_algorithm="EAGLE", speculative_draft_model_path=str(tmp_path / "eagle"),
        speculative_num_steps=NUM_STEPS, speculative_adaptive=False, disable_overlap_schedule=True,
    )  # fmt: skip
    outputs_of = jax.jit(lambda batch: chain_outputs(draft, batch, NUM_STEPS))
    compared = compare(engine, target, (FINAL,), outputs_of, lambda step, hidden: draft.logits(hidden[None])[0])
    assert min(compared) > 20


def test_mtp_layers_side_by_side_are_what_is_drafted() -> None:
    checkpoint = open_checkpoint(MIMO)
    target = load_model(checkpoint, jnp.float32)
    layers: list[Any] = [layer.bind(layer.leaves) for layer in load_mtp_layers(checkpoint, target, jnp.float32)]
    engine = make_engine(MIMO, speculative_algorithm="MTP", speculative_adaptive=False, disable_overlap_schedule=True)
    points, outputs_of = layers[0].feature_points, jax.jit(lambda batch: layer_outputs(layers, batch))
    compared = compare(engine, target, points, outputs_of, lambda step, hidden: layers[step].logits(hidden[None])[0])
    assert min(compared[:2]) > 20


@pytest.mark.parametrize("algorithm", ["EAGLE", "MTP"])
def test_what_was_trained_is_served(algorithm: str, folder: Path, trained: Callable[[str], tuple[Path, Any]]) -> None:
    """It changes no token, and most of what it drafts holds, though these prompts are no texts like those it saw."""
    output, _ = trained(algorithm)
    model = folder / ("mimo" if algorithm == "MTP" else "model")
    drafts: dict[str, Any] = {"speculative_algorithm": algorithm, "speculative_adaptive": False}
    if algorithm == "EAGLE":
        paths = {"draft_model_path": output, "token_map": output / "token_map.json"}
        drafts |= {f"speculative_{name}": str(path) for name, path in paths.items()}
    plain = make_engine(model, greedy_programs=False)
    engine = make_engine(output if algorithm == "MTP" else model, greedy_programs=False, **drafts)
    try:
        assert engine.config.speculative_num_steps == (2 if algorithm == "MTP" else 3)
        for params in ({}, {"temperature": 1.0, "seed": 3}):
            assert run(engine, f"a{len(params)}", params) == run(plain, f"b{len(params)}", params)
        assert engine.scheduler.speculation.figures.acceptance_rate > 0.5
    finally:
        plain.close()
        engine.close()
