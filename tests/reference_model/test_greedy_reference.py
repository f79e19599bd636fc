"""The default model's greedy output equals another framework's, token for token, in every configuration.

Every backend and page size runs in four schedules: overlap on and off, fine and coarse fence. Programs depend only on
backend and page size, so one engine serves all four; the fence and the schedule are switched between runs.

To the end-of-sequence: all eight prompts together, and some of them alone (not with page size 1, which is slow), with
overlap and the fine fence. The other schedules run the same programs and stop after a few tokens.
``JAXSERVE_TEST_FULL=1`` runs everything to the end.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jaxserve.attention.registry import _registered, register_attention_backend
from jaxserve.attention.xla import XlaBackend
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.llm import LLM

REFERENCES = [
    json.loads(path.read_text()) for path in sorted((Path(__file__).parents[1] / "reference").glob("0*.json"))
]
SCHEDULES = [(overlap, coarse) for overlap in (True, False) for coarse in (False, True)]
FULL = os.environ.get("JAXSERVE_TEST_FULL") == "1"
SHORT = 64 if FULL else 12  # tokens per request where only the schedule differs from a run that went to the end
ALONE = REFERENCES if FULL else [r for r in REFERENCES if r["name"][:2] in ("01", "04", "07")]

BACKENDS: dict[str, dict[str, Any]] = {
    "native": {"attention_backend": "native"},
    "xla": {"attention_backend": "xla"},
    "xla-live": {"attention_backend": "xla-live"},
    "planned": {"attention_backend": "planned"},
    "hybrid": {
        "attention_backend": "hybrid", "prefill_attention_backend": "planned", "decode_attention_backend": "native",
    },
    "outside": {"attention_backend": "outside"},
}  # fmt: skip
NGRAM = {
    "attention_backend": "native", "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4,
    "speculative_adaptive": False,
}  # fmt: skip
# Every program of thirty layers takes some seconds to compile. The default configuration has those of several sizes.
SIZES: dict[str, Any] = {"prefill_token_buckets": (64, 128), "decode_batch_buckets": (1, 8)}
ONE_SIZE = {"prefill_token_buckets": (128,), "decode_batch_buckets": (8,), "max_prefill_tokens": 0}
# Every backend is compared with the oracle on tiny models, too; the others here take minutes.
OFTEN = (("native", 16), ("xla", 1))
CONFIGURATIONS = [
    (name, page_size, settings)
    for name, settings in BACKENDS.items()
    for page_size in (16, 1)
    if FULL or (name, page_size) in OFTEN
]
EAGLE3 = {
    "attention_backend": "native", "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "default",
    "speculative_adaptive": False,
}  # fmt: skip
CONFIGURATIONS += [("NGRAM", 16, NGRAM), ("EAGLE3", 16, EAGLE3)]


class Outside(XlaBackend):
    """Somebody's own backend that declares nothing: the full-execution fence."""


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=lambda v: f"{v[0]}, page {v[1]}")
def llm(request, default_model):
    backend, page_size, settings = request.param
    if backend == "outside":
        register_attention_backend("outside", Outside)
    try:
        with LLM(
            str(default_model),
            context_length=512,
            page_size=page_size,
            num_pages=4096 // page_size,
            chunked_prefill_size=128,
            skip_warmup=True,
            **(SIZES if FULL or backend == "native" else ONE_SIZE),
            **settings,
        ) as built:
            yield built
    finally:
        _registered.pop("outside", None)


def check(llm: LLM, batches: list[list[dict]], limit: int) -> None:
    for batch in batches:
        outputs = llm.generate(
            [reference["prompt_ids"] for reference in batch],
            SamplingParams(temperature=0.0, max_tokens=limit, logprobs=5),
        )
        for reference, output in zip(batch, outputs, strict=True):
            end = reference["first_eos_index"]
            expected = reference["output_ids"][: limit if end is None else min(limit, end + 1)]
            got = output.outputs[0]
            assert got.token_ids == expected, reference["name"]
            assert got.finish_reason == ("stop" if expected[-1] == reference["eos_id"] else "length")
            for step, logprob in zip(reference["steps"], got.logprobs or [], strict=False):
                top = dict(map(tuple, step["top5"]))
                assert logprob.logprob == pytest.approx(top[logprob.token_id], abs=1e-3)
                for (token, value), (want_token, want_value) in zip(logprob.top, step["top5"], strict=True):
                    assert value == pytest.approx(want_value, abs=1e-3)
                    assert token == want_token or value == pytest.approx(top.get(token, value), abs=1e-3)


@pytest.mark.parametrize(("overlap", "coarse"), SCHEDULES, ids=lambda v: str(v))
def test_greedy_output_equals_the_reference(llm, overlap, coarse):
    engine = llm.engine
    engine._overlap = overlap
    barrier = engine.scheduler.barrier
    barrier.force_coarse = coarse
    barrier.counts.clear()
    to_the_end = overlap and not coarse
    check(llm, [REFERENCES], 64 if to_the_end else SHORT)
    if (to_the_end and engine.config.page_size > 1) or FULL:
        check(llm, [[reference] for reference in ALONE], 64)
    kinds = {kind for kind, _ in barrier.counts}
    if coarse or engine.parts.worker.model_runner.backend.name == "outside":
        assert kinds == {"coarse"}
    elif engine.scheduler.speculation is None:
        assert "fine" in kinds
    else:  # there may be none but verify steps
        is_ngram = engine.scheduler.speculation.algorithm.name == "NGRAM"
        assert (("coarse", "ngram") if is_ngram else ("fine", "marker")) in barrier.counts
        assert engine.scheduler.speculation.figures.num_accepted > 20
    engine.scheduler.check_integrity()
    assert engine.scheduler.memory.num_available == engine.scheduler.pool.num_usable
