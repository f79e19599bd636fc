"""Requests whose outputs depend on every control, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.token_constraint import TokenConstraint

FEW = dict.fromkeys((11, 46, 97, 110, 115, 200, 231, 244), 14.0)  # so likely that outputs repeat themselves


class Turns(TokenConstraint):
    """Allows ids by what came before: id % 5 is neither the turn % 5 nor that of the token before."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def _allows(self, token: int) -> bool:
        before = self.taken[-1] % 5 if self.taken else 3
        return token % 5 not in (len(self.taken) % 5, before)

    def fill_mask(self, words: np.ndarray) -> None:
        words[:] = 0
        for token in filter(self._allows, range(260)):
            words[token // 32] |= np.uint32(1 << token % 32)

    def advance(self, token_id: int) -> bool:
        allowed = self._allows(token_id)
        if allowed:
            self.taken.append(token_id)
        return allowed

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]

    @property
    def is_complete(self) -> bool:
        return False


@dataclass(frozen=True)
class Case:
    """A request."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    constraint: Callable[[], TokenConstraint] | None = None


CONTROLS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "frequency": {"frequency_penalty": 1.4},
    "presence": {"presence_penalty": 1.9},
    "presence below zero": {"presence_penalty": -1.1},
    "repetition": {"repetition_penalty": 1.8},
    "minimum": {"min_tokens": 7, "stop_token_ids": (110, 244, 115)},
    "bias": {"logit_bias": {**FEW, 97: -100, 110: -100}},
    "all": {"frequency_penalty": 0.7, "presence_penalty": 0.6, "repetition_penalty": 1.5, "min_tokens": 5,
            "stop_token_ids": (97, 110, 231)},
    "mask": {},
    "mask alone": {"logit_bias": {}},  # a draft model that knows nothing of it is often right
    "mask and all": {"frequency_penalty": 0.7, "repetition_penalty": 1.7, "min_tokens": 7,
                     "stop_token_ids": (115, 244)},
}  # fmt: skip


def cases() -> list[Case]:
    """Each control greedy and sampled; prompts of several lengths, which repeat themselves."""
    random = np.random.default_rng(4)
    found = []
    for i, (name, controls) in enumerate(CONTROLS.items()):
        for temperature in (0.0, 0.8):
            prompt = random.choice([*FEW, *range(250)], 3 + (13 * i + 5) % 40)
            prompt[-2:] = [*FEW][i % 7], 30 + i
            params = SamplingParams(
                **{"logit_bias": FEW, **controls}, max_tokens=9 + 5 * i % 17, temperature=temperature, seed=7 * i + 1,
                ignore_eos=True,
            )  # fmt: skip
            constraint = Turns if name.startswith("mask") else None
            found.append(Case(f"{name}, {temperature}", tuple(int(t) for t in prompt), params, constraint))
    return found
