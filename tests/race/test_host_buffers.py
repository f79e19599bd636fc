"""O-26: what the host hands to a launch stays the launch's own, and the pool is passed on in place.

On the CPU a program reads an int32 array of the host where it lies if it is aligned to 64 bytes, and a copy of it if it
is not. numpy aligns to 16, so whoever rewrites such an array under a launch corrupts tokens now and then.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import make_engine, run, stalled
from oracle import greedy_full_recompute

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import load_model
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.step_runner import StepRunner


def at_offset(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy that lies ``offset`` bytes behind a multiple of 64."""
    memory = np.zeros(array.nbytes + 128, np.uint8)
    first = -memory.ctypes.data % 64 + offset
    placed = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    assert placed.ctypes.data % 64 == offset
    return placed


class Handed:
    """Moves every array that the host hands to a program to an address of a given alignment, and lets it follow its
    original, as if the engine itself had put it there.

    Attributes:
        num_arrays: arrays that were moved.
        rewritten: shapes of those that changed after they were handed over.
    """

    def __init__(self, offset: int, patch: pytest.MonkeyPatch):
        self.num_arrays = 0
        self.rewritten: list[tuple[int, ...]] = []
        self._moved: list[tuple[np.ndarray, np.ndarray]] = []
        self._offset = offset
        call = ProgramCache.call

        def moved_call(programs: ProgramCache, key: Any, *arguments: Any) -> Any:
            self.follow()
            return call(programs, key, *jax.tree.map(self._move, arguments))

        patch.setattr(ProgramCache, "call", moved_call)

    def _move(self, leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or not leaf.ndim:
            return leaf
        placed = at_offset(leaf, self._offset)
        self._moved.append((leaf, placed))
        self.num_arrays += 1
        return placed

    def follow(self) -> None:
        """Copies what the engine has written since into the moved arrays. Launches in flight may be reading them."""
        for original, placed in self._moved:
            if not np.array_equal(original, placed):
                self.rewritten.append(original.shape)
                placed[...] = original


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[Engine]:
    built = make_engine(tiny_model)
    yield built
    built.close()


PROMPTS = [[int(t) for t in np.random.default_rng(seed).integers(0, 250, 44)] for seed in range(8)]


@pytest.fixture(scope="module")
def right_first_tokens(tiny_model) -> list[list[int]]:
    loaded = load_model(open_checkpoint(tiny_model), jnp.float32)
    return [greedy_full_recompute(loaded, prompt, 1) for prompt in PROMPTS]


def run_chunks(engine: Engine) -> list[list[int]]:
    """The first tokens of long prompts: nothing but chunks, of several prompts in turn, so that each step has arrays of
    the same shapes as the one in flight."""
    engine.flush_cache()
    tokens: dict[str, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.add(Request(f"chunks-{number}", tuple(prompt), params))
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] = list(delta.token_ids)
    return [tokens[f"chunks-{number}"] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("offset", [0, 16], ids=["read in place", "copied"])
def test_tokens_are_right_at_any_alignment(engine, right_tokens, right_first_tokens, monkeypatch, offset):
    """O-26: a hundred overlapped steps that read late, while the next ones are planned."""
    handed, first = Handed(offset, monkeypatch), engine.scheduler.step_number
    for _ in range(2):
        with stalled("late reads"):
            assert run_chunks(engine) == right_first_tokens
            assert run(engine) == right_tokens
        handed.follow()
    assert engine.scheduler.step_number > first + 100 and handed.num_arrays > 300
    assert handed.rewritten == []


def test_an_array_used_again_is_noticed(engine, right_first_tokens, monkeypatch):
    """The fault this is about: one array for all steps, rewritten for each."""
    make, kept = StepRunner.inputs, {}

    def used_again(name: str, array: np.ndarray) -> np.ndarray:
        same = kept.setdefault((name, array.shape), np.zeros_like(array))
        same[...] = array
        return same

    def rewriting(runner, batch):
        shape, inputs = make(runner, batch)
        arrays = {name: used_again(name, getattr(inputs, name)) for name in ("row_ids", "tokens", "relay_slots")}
        return shape, inputs._replace(**arrays)

    monkeypatch.setattr(StepRunner, "inputs", rewriting)
    handed = Handed(0, monkeypatch)
    with stalled("late reads"):
        wrong = run_chunks(engine)
    engine.flush_cache()  # of wrong pages
    assert handed.rewritten, "nobody saw the array change"
    assert wrong != right_first_tokens, "nothing was read in place, so the test above proves nothing"


def test_the_pool_is_passed_on_in_place(engine, right_tokens, monkeypatch):
    """O-26: its address never changes, nothing warns that a donation was of no use, and what was given away is gone."""
    runner = engine.parts.worker.model_runner
    address, keep = runner.pool.data.unsafe_buffer_pointer(), StepRunner._keep
    addresses, old = [], runner.pool.data

    def watched(steps: StepRunner, outputs: Any) -> Any:
        addresses.append(outputs.pool.data.unsafe_buffer_pointer())
        return keep(steps, outputs)

    monkeypatch.setattr(StepRunner, "_keep", watched)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(engine) == right_tokens
    assert len(addresses) > 30 and set(addresses) == {address}
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old)


def test_a_view_of_the_pool_turns_donation_into_a_copy(engine, right_tokens):
    """So nothing in the engine may hold one; and the check above would notice."""
    runner = engine.parts.worker.model_runner
    address = runner.pool.data.unsafe_buffer_pointer()
    view = np.asarray(runner.pool.data)
    assert run(engine) == right_tokens
    assert runner.pool.data.unsafe_buffer_pointer() != address and view.ctypes.data == address
