"""Penalties, bias, held-back stop ids, token masks: the tokens of a full recompute in numpy, however they are made."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from controls_oracle import continued
from drafters import Prophet
from requests_with_controls import CONTROLS, cases
from rig import check_idle, make_engine

from jaxserve.core.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.testing.poison import Poison

FEW_PAGES = 24  # so that sequences are preempted
SPECULATIVE = {"speculative_adaptive": False, "speculative_num_draft_tokens": 6}
CONFIGURATIONS = {
    "native": {},
    "native, race check": {"race_check": True},
    "native, no overlap": {"disable_overlap_schedule": True},
    "planned, page size 1": {"attention_backend": "planned", "page_size": 1, "num_pages": 96},
    "PROPHET": {"speculative_algorithm": "PROPHET", **SPECULATIVE},
    "TREE-PROPHET": {"speculative_algorithm": "TREE-PROPHET", **SPECULATIVE},
    "STANDALONE": {"speculative_algorithm": "STANDALONE", **SPECULATIVE, "speculative_num_draft_tokens": 4},
}


def serve(engine: Engine, wanted) -> dict[str, list[int]]:
    """Outputs by case; all arrive together."""
    outputs: dict[str, list[int]] = {}
    for case, _ in wanted:
        engine.add(Request(case.name, case.prompt, case.params, constraint=case.constraint))
        outputs[case.name] = []
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            outputs[delta.request_id] += delta.token_ids
    check_idle(engine)
    return outputs


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_tokens_equal_the_oracle(name, tiny, wanted, prophets):
    settings = {"num_pages": FEW_PAGES, **CONFIGURATIONS[name]}
    if name == "STANDALONE":  # its drafts never pass the host
        settings["speculative_draft_model_path"] = str(tiny)
    engine = make_engine(tiny, **settings)
    if "race_check" not in CONFIGURATIONS[name]:  # the garbage is no write of the scheduler's
        Poison(engine, Prophet.future_of if "PROPHET" in name else None)
    try:
        right = {case.name: output for case, output in wanted}
        for _ in range(2):  # slots are used again
            assert serve(engine, wanted) == right
        assert engine.scheduler.num_preemptions > 3
        if engine.scheduler.speculation is not None:
            # A draft model knows nothing of bias and penalties.
            assert engine.scheduler.speculation.figures.num_accepted > (5 if name == "STANDALONE" else 100)
    finally:
        engine.close()


def test_every_control_matters(loaded, wanted):
    """Without it some output would be another one, so the tests above can fail."""
    by_name = {case.name: (case, output) for case, output in wanted}
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
    for name, controls in CONTROLS.items():
        case, output = by_name[f"{name}, 0.0"]
        for field in controls.keys() & neutral.keys():
            params = dataclasses.replace(case.params, **{field: neutral[field]})
            assert continued(loaded, case.prompt, params, case.constraint)[0] != output, (name, field)
        if case.constraint is not None:
            assert continued(loaded, case.prompt, case.params)[0] != output


def test_cases_repeat_themselves(wanted):
    repeats = [len(output) - len(set(output)) for _, output in wanted]
    assert np.mean(repeats) > 3 and len(wanted) == len(cases())
