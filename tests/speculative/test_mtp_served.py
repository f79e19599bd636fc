"""MTP layers behind the target: no token changes, and every draft is what the layers give over the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import SETTINGS, STALL_US, change_sizes, make_engine, run, workload
from oracle import full_attention, greedy_full_recompute
from tiny import byte_tokenizer_files, write_folder

from jaxserve.barrier.native import native_module
from jaxserve.barrier.race_check import RaceError
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.engine.engine import Engine
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.mtp import load_mtp_layers
from jaxserve.models.loading.weights import LoadedModel, load_model
from jaxserve.runner.sampler import gumbel_noise
from jaxserve.runner.sampling_rows import SEED_HIGH, SEED_LOW, sampling_row
from jaxserve.runner.worker import DraftWorker
from jaxserve.speculative.registry import find_algorithm, settled
from jaxserve.testing import algorithm_conformance
from jaxserve.testing.configuration_programs import ConfigurationPrograms
from jaxserve.testing.poison import Poison

MIMO = Path(__file__).parent.parent / "fixtures" / "mimo"
NUM_LAYERS = 3
SAMPLED = {"temperature": 1.0, "seed": 3}
FEW_PAGES = {"num_pages": 24}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "native": FEW_PAGES,
    "xla, no marker, page size 1": {"attention_backend": "xla", "shared_read_marker": False, "page_size": 1},
}
STALLS = {"snapshot.before_reads": STALL_US // 2, "stream.before_copy": STALL_US // 4}
PADDED = 64  # tokens the oracle computes at a time; those behind a sequence change nothing


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of the fixture, to compile less; logits that leave room for chance; and one MTP layer more."""
    source = open_checkpoint(MIMO)
    config = dict(source.config) | {"num_hidden_layers": 1}
    config |= {key: config[key][:1] for key in ("layer_types", "mlp_layer_types")}
    tensors = {
        name: np.array(tensor)
        for name, tensor in source.tensors.items()
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }
    tensors["lm_head.weight"] *= 0.3
    random = np.random.default_rng(2)
    for name in [name for name in tensors if name.startswith("model.mtp.layers.1.")]:
        noise = random.standard_normal(tensors[name].shape).astype(np.float32)
        tensors[name.replace("layers.1", "layers.2")] = 1 + 0.3 * noise if "norm" in name else 0.3 * noise
    return write_folder(byte_tokenizer_files(tmp_path_factory.mktemp("mimo")), config, tensors)


@pytest.fixture(scope="module")
def target(mimo: Path) -> LoadedModel:
    return load_model(open_checkpoint(mimo), jnp.float32)


@pytest.fixture(scope="module")
def plain_tokens(mimo: Path, target: LoadedModel) -> list[list[list[int]]]:
    """What plain decoding says, greedily and by chance; the first is right."""
    engine = make_engine(mimo, greedy_programs=False)
    try:
        greedy, drawn = run(engine, "greedy"), run(engine, "drawn", params=SAMPLED)
    finally:
        engine.close()
    prompt, length = workload()[1]
    assert greedy[1] == greedy_full_recompute(target, prompt, length)
    return [greedy, drawn]


@pytest.fixture
def native() -> Iterator[Any]:
    """The extension, without hold points and faults afterwards."""
    module = native_module("cpu")
    yield module
    module.hold_points.clear()
    module.faults.clear()


def drafting(mimo: Path, **settings: Any) -> Engine:
    return make_engine(
        mimo, **{"speculative_algorithm": "MTP", "speculative_adaptive": False, "greedy_programs": False, **settings}
    )


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_tokens_are_those_of_plain_decoding(configuration, mimo, plain_tokens, native):
    """Greedy and drawn, with every shared row overwritten as soon as the barrier allows it, and under stalls."""
    engine = drafting(mimo, **CONFIGURATIONS[configuration])
    poison = Poison(engine)
    try:
        assert run(engine, "greedy") == plain_tokens[0]
        for point, microseconds in STALLS.items():
            native.hold_points.delay(point, microseconds)
        assert run(engine, "drawn", params=SAMPLED) == plain_tokens[1]
        figures = engine.scheduler.speculation.figures
        assert figures.num_accepted > 10 and figures.acceptance_rate < 1.0
        assert poison.num_poisoned > 20
        if CONFIGURATIONS[configuration] is FEW_PAGES:
            assert engine.scheduler.num_preemptions > 0
    finally:
        native.hold_points.clear()
        engine.close()


def test_the_last_layer_owns_the_event(mimo):
    """Every layer has a pool and a mailbox of its own; the others' events are never taken."""
    engine = drafting(mimo, **FEW_PAGES)
    worker = engine.parts.worker
    try:
        run(engine)
        assert [runner.name for runner in worker.model_runners] == ["target", "draft-0", "draft-1", "draft-2"]
        assert worker.last_shared_read_runner is worker.model_runners[-1]
        counts = engine.scheduler.barrier.counts
        assert counts["fine", "marker"] > 10
        assert set(counts) == {("fine", "marker"), ("coarse", "extend")}
        left = [runner.shared_read_done_event is not None for runner in worker.model_runners]
        assert left == [True, True, True, False]
        assert len({id(runner.pool.data) for runner in worker.model_runners}) == NUM_LAYERS + 1
        kv = worker.model_runners[-1].kv
        assert engine.scheduler.speculation.algorithm.kv_bytes_per_page(4) == NUM_LAYERS * kv.bytes_per_page
    finally:
        engine.close()


def test_it_conforms(mimo):
    report = algorithm_conformance(
        "MTP",
        page_sizes=(4,),
        settings={**SETTINGS, "model": str(mimo), "speculative_num_draft_tokens": NUM_LAYERS + 1},
    )
    assert report.num_drafted > 500 and report.num_accepted > 5


@pytest.mark.parametrize("wrong", ["target", "draft-1"])
def test_nobody_else_owns_the_event(wrong, mimo, monkeypatch):
    """The race check sees a fence that ends with the reads of a launch that others follow."""

    def owner(self: DraftWorker) -> Any:
        return next(runner for runner in self.model_runners if runner.name == wrong)

    monkeypatch.setattr(DraftWorker, "last_shared_read_runner", property(owner))
    engine = drafting(mimo, race_check=True, **FEW_PAGES)
    try:
        with pytest.raises(RaceError, match=r"(?s)write .*\n  read .* execution \(draft-"):
            run(engine)
    finally:
        monkeypatch.undo()
        engine.close()


@pytest.mark.parametrize("kind", ["launch", "dispatched"])
def test_a_layer_that_fails_takes_nobody_with_it(kind, mimo, plain_tokens, native):
    """The requests of the step are told, what was launched ends, and the next ones get the right tokens."""
    engine = drafting(mimo, **FEW_PAGES)
    steps = 1 + NUM_LAYERS
    try:
        for layer in range(NUM_LAYERS):
            native.faults.fail_nth(kind, 5 * steps + 2 + layer)
            with pytest.raises(RuntimeError, match="draft program failed: injected fault"):
                run(engine, f"failed-{layer}")
            while engine.has_work:
                engine.step()
            assert native.faults.failures(kind) == 1
            native.faults.clear()
            assert run(engine, f"again-{layer}") == plain_tokens[0]
    finally:
        engine.close()


# -- drafts against a full recomputation ------------------------------------------------------------------------------


class Oracle:
    """Drafts behind a sequence, computed without cache, batch, block table or tail.

    Args:
        target: its sequences are sampled at temperature 1.
    """

    def __init__(self, mimo: Path, target: LoadedModel):
        self.target = target
        self.layers = load_mtp_layers(open_checkpoint(mimo), target, jnp.float32)
        positions = jnp.arange(PADDED)

        @jax.jit
        def residual(leaves: list[jax.Array], token_ids: jax.Array) -> jax.Array:
            seen: dict[int, jax.Array] = {}
            attend = full_attention(target.config.attention_windows)
            target.bind(leaves)(token_ids, positions, attend, seen.__setitem__)
            return seen[target.config.num_layers]

        first = self.layers[0]
        windows = first.config.attention_windows

        @jax.jit
        def logits(leaves: list[jax.Array], token_ids: jax.Array, features: jax.Array, last: int) -> jax.Array:
            layer = first.bind(leaves)  # they differ in their weights alone
            hidden = layer(token_ids, positions, layer.features(features), full_attention(windows))
            return layer.logits(hidden[last][None])[0]

        self._residual, self._logits = residual, logits

    def drafts(self, sequence: Sequence) -> list[tuple[int, float]]:
        """Each with how far it is ahead of the next best. The newest token has not been computed by the target."""
        token_ids = list(sequence.token_ids)
        newest = len(token_ids) - 1
        features = self._residual(self.target.leaves, padded(token_ids))
        vocab = self.target.config.vocab_size
        _, ints = sampling_row(sequence.request.params, sequence.seed, vocab)
        seed = [ints[place] for place in (SEED_LOW, SEED_HIGH)]
        found = []
        for number, layer in enumerate(self.layers):
            scores = self._logits(layer.leaves, padded(token_ids[1 + number :]), features, newest - 1)
            [noise] = gumbel_noise(*jnp.array([*seed, len(token_ids)], jnp.int32)[:, None], vocab)
            scores = np.asarray(scores + noise)
            second, best = np.argsort(scores)[-2:]
            found.append((int(best), float(scores[best] - scores[second])))
            token_ids.append(int(best))
        return found


def padded(token_ids: list[int]) -> np.ndarray:
    return np.pad(np.array(token_ids, np.int32), (0, PADDED - len(token_ids)))


def test_drafts_equal_a_full_recomputation(mimo, target, monkeypatch):
    """Behind prompts of one and of several chunks and behind every step, whether it verifies many drafts, few or none;
    several sequences at a time."""
    engine = drafting(mimo, disable_overlap_schedule=True, speculative_adaptive=True, **FEW_PAGES)
    chosen = change_sizes(monkeypatch, engine)
    oracle = Oracle(mimo, target)
    compared, held = np.zeros(NUM_LAYERS, int), engine.scheduler.speculation.figures
    prompts = [*workload()[1:5], ([7], 9), ([8, 9], 9), (workload()[5][0][:18], 12)]
    try:
        for number, (prompt, length) in enumerate(prompts):
            params = SamplingParams(max_tokens=min(length, 12), ignore_eos=True, **{**SAMPLED, "seed": number})
            engine.add(Request(str(number), tuple(prompt), params))
        while engine.has_work:
            engine.step()
            relay = np.asarray(engine.parts.worker.draft_runner.drafted)
            for sequence in engine.scheduler.running:
                if sequence.slot is None or sequence.prefilling or sequence.num_in_flight:
                    continue
                there = sequence.num_drafts
                assert np.all(relay[sequence.slot, there:] == -1), "as many as the scheduler counts on"
                for layer, (token, margin) in enumerate(oracle.drafts(sequence)[:there]):
                    if margin < 1e-3:
                        break  # rounding may decide, and all that follows depends on it
                    assert relay[sequence.slot][layer] == token, f"{layer} behind {len(sequence.token_ids)} tokens"
                    compared[layer] += 1
        assert compared.min() > 20 and set(chosen) == {1, 2, NUM_LAYERS + 1}
        assert held.num_accepted > 10 and held.acceptance_rate < 0.9, "one kind of step was never seen"
    finally:
        engine.close()


# -- settings ----------------------------------------------------------------------------------------------------------


def test_as_many_steps_as_there_are_layers(mimo):
    config = EngineConfig(model=str(mimo), speculative_algorithm="nextn", speculative_draft_model_path=str(mimo))
    found = settled(config)
    assert (found.speculative_num_steps, found.speculative_num_draft_tokens) == (NUM_LAYERS, NUM_LAYERS + 1)
    assert settled(found) == found
    assert find_algorithm("NEXTN") is find_algorithm("MTP")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_num_steps": 4}, r"--speculative-num-steps 4: each MTP layer drafts one token, and .* has 3"),
        ({"speculative_num_draft_tokens": 6}, "--speculative-num-steps 5: each MTP layer drafts one token"),
        ({"speculative_draft_model_path": str(MIMO)}, "MTP layers come with the model: leave out"),
        ({"model": "default"}, "the default model has none; give --model"),
    ],
)
def test_what_is_refused(settings, message, mimo):
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(**{"model": str(mimo), "speculative_algorithm": "MTP", "context_length": 64, **settings}))


def test_what_a_layer_reads_of_shared_rows_ends_with_its_marker(mimo):
    """Of the last layer's programs: proven in what XLA made of them."""
    few = {"prefill_token_buckets": (16,), "chunked_prefill_size": 16, "max_running_requests": 2, "context_length": 64}
    paced = {"speculative_algorithm": "MTP", "speculative_adaptive": False, "page_size": 4}
    found = ConfigurationPrograms(EngineConfig(model=str(mimo), **paced, **few))
    programs = [program for program in found.programs() if program.key.shape.mode is ForwardMode.DRAFT_EXTEND]
    assert len(programs) == 2 * NUM_LAYERS  # batches of 1 and 2
    report = found.report(programs[-1])
    assert report.violations == () and report.marker and report.donated


def test_random_layers_need_no_weights(mimo):
    """As many as the published model has, and with the target's own embedding and head."""
    engine = drafting(mimo, load_format="dummy", **FEW_PAGES)
    try:
        assert [len(tokens) for tokens in run(engine)] == [length for _, length in workload()]
        model, layers = engine.parts.model, engine.scheduler.speculation.algorithm.layers
        assert len(layers) == NUM_LAYERS
        for layer in layers:
            assert all(layer.leaf(path) is model.leaf(path) for path in ("embed_tokens", "lm_head"))
        assert not np.array_equal(layers[0].leaf("eh_proj"), layers[1].leaf("eh_proj"))
    finally:
        engine.close()
