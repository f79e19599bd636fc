"""Does decoding in another way say what plain decoding says?

    from jaxserve.testing import check_lossless
    def test_my_settings():
        check_lossless(EngineConfig(model="...", speculative_algorithm="NGRAM"), ["Once upon a time"])

Plain decoding, one prompt at a time, with overlap and the backend's own fence, is the reference. Against it stand
speculation, overlap off, the forced coarse fence, and NGRAM's other fence, each with one prompt at a time and with all
of them together.

Greedy tokens must be equal. So must sampled ones: random numbers come from seed and position. So must greedy tokens
under frequency and presence penalties ("controlled"), which depend on every token before. Two programs may round
differently, so a different token counts as a tie if plain decoding preferred its own by less than the tie margin.
Whether sampled tokens are distributed as they should be is another question, with a chi-square test to answer it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidRequest
from jaxserve.core.request import CompletionOutput, RequestOutput, TokenLogprob
from jaxserve.core.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams
from jaxserve.engine.llm import LLM
from jaxserve.runner.sampler import gumbel_noise
from jaxserve.runner.sampling_rows import SEED_HIGH, SEED_LOW, sampling_row
from jaxserve.testing.draw_statistics import chi_square, count_ranks
from jaxserve.testing.lossless_report import Comparison, Difference, Distribution, LosslessError, LosslessReport

TIE_MARGIN = 1e-4  # nats; float32 logits of two programs differ by some 1e-5
LOGPROB_TOLERANCE = 1e-3  # nats
SIGNIFICANCE = 1e-4
DRAW_TOKENS = 16  # of each output that is drawn for the distribution, the first one, which nobody drafts, not counted
PENALTIES: dict[str, Any] = {"frequency_penalty": 0.6, "presence_penalty": 0.4}
SEED_STRIDE = 1_000_003
REFERENCE: dict[str, Any] = {
    "speculative_algorithm": None, "disable_overlap_schedule": False, "force_coarse_war_barrier": False,
}  # fmt: skip


Prompts = Sequence[str | Sequence[int]]


@dataclass(frozen=True)
class Draws:
    """What to draw for the chi-square test.

    Attributes:
        count: tokens, about; 0: none.
        temperature, top_k: of the draws; ``top_k`` 1 .. 20, or temperature 1 and ``top_k`` 0.
    """

    count: int = 2000
    temperature: float = 1.0
    top_k: int = 0


def ways_of(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """The ways that are compared with plain decoding: name -> fields of the configuration."""
    overlap_off, coarse = {"disable_overlap_schedule": True}, {"force_coarse_war_barrier": True}
    ways = {"plain": REFERENCE, "plain, overlap off": REFERENCE | overlap_off, "plain, coarse": REFERENCE | coarse}
    name = config.speculative_algorithm
    if name is not None:
        # Adaptive speculation may find that drafts do not pay and verify none.
        drafting = REFERENCE | {"speculative_algorithm": name, "speculative_adaptive": False}
        ways[name] = drafting
        ways[f"{name}, adaptive"] = drafting | {"speculative_adaptive": True}
        ways |= {
            f"{name}, overlap off": drafting | overlap_off,
            f"{name}, coarse": drafting | coarse,
        }
        if name.upper() == "NGRAM":
            other = "relay" if config.speculative_ngram_fence == "coarse" else "coarse"
            ways[f"{name}, its fence {other}"] = drafting | {"speculative_ngram_fence": other}
    return ways


def check_lossless(config: EngineConfig | str, prompts: Prompts, **options: Any) -> LosslessReport:
    """Compares the ways of decoding, and raises if one of them says something else.

    Args:
        config: model, backend, page size and so on; or a model. Its algorithm is compared; with none, only overlap and
            fence.
        prompts: texts or token ids; they decode together as far as ``max_running_requests`` allows.
        options: see ``examine_lossless``.

    Raises:
        LosslessError: the message lists every violation.
        ConfigError, ModelLoadError, InvalidRequest: settings or prompts that cannot work.
    """
    report = examine_lossless(config, prompts, **options)
    if report.violations:
        raise LosslessError("; ".join(report.violations))
    return report


def examine_lossless(
    config: EngineConfig | str,
    prompts: Prompts,
    *,
    max_tokens: int = 32,
    ways: Mapping[str, Mapping[str, Any]] | None = None,
    draws: Draws = Draws(0),
    seed: int = 1,
    tie_margin: float = TIE_MARGIN,
    progress: Callable[[str], None] = lambda message: None,
) -> LosslessReport:
    """As ``check_lossless``, but returns what is wrong instead of raising it.

    Args:
        max_tokens: of each output; ends of sequence are ignored.
        ways: name -> fields of the configuration, instead of those of ``ways_of``.
        draws: for a chi-square test of the first way that speculates and the first that does not.
        seed: of the first prompt's sampled output; the next has the next one.
        tie_margin: nats.
        progress: called when a way is begun.
    """
    if isinstance(config, str):
        config = EngineConfig(model=config)
    if not prompts:
        raise InvalidRequest("wanted at least one prompt to compare outputs of", param="prompt")
    report = LosslessReport(tie_margin, LOGPROB_TOLERANCE, SIGNIFICANCE)
    ways = dict(ways_of(config) if ways is None else ways)
    progress("plain, one prompt at a time: the reference")
    with _opened(config, REFERENCE) as llm:
        check = _Check(llm, prompts, max_tokens, seed, tie_margin)
    drawn: set[bool] = set()
    for name, settings in ways.items():
        progress(name)
        with _opened(config, settings) as llm:
            report.comparisons += check.compare(llm, name, is_reference=dict(settings) == REFERENCE)
            is_plain = llm.engine.scheduler.speculation is None
            if draws.count and is_plain not in drawn:
                drawn.add(is_plain)
                report.distributions.append(draw(llm, name, prompts, draws, seed + len(drawn)))
    return report


def _opened(config: EngineConfig, settings: Mapping[str, Any]) -> LLM:
    return LLM(**dataclasses.asdict(dataclasses.replace(config, **settings)))


class _Check:
    """Outputs of plain decoding, one prompt at a time, and how others compare."""

    def __init__(self, llm: LLM, prompts: Sequence[Any], max_tokens: int, seed: int, tie_margin: float):
        self._prompts = list(prompts)
        self._tie_margin = tie_margin
        self._vocab = llm.engine.model_config.vocab_size
        common: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": MAX_LOGPROBS}
        self._params = {
            "greedy": [SamplingParams(temperature=0.0, **common)] * len(prompts),
            "sampled": [SamplingParams(temperature=1.0, seed=seed + i, **common) for i in range(len(prompts))],
            "controlled": [SamplingParams(temperature=0.0, **PENALTIES, **common)] * len(prompts),
        }
        self._wanted = {kind: self._alone(llm, kind) for kind in self._params}

    def _alone(self, llm: LLM, kind: str) -> list[RequestOutput]:
        pairs = zip(self._prompts, self._params[kind], strict=True)
        return [output for prompt, params in pairs for output in llm.generate([prompt], params)]

    def _together(self, llm: LLM, kind: str) -> list[RequestOutput]:
        return llm.generate(self._prompts, self._params[kind])

    def compare(self, llm: LLM, way: str, is_reference: bool) -> list[Comparison]:
        """Everything of one way; what would be compared with itself is left out."""
        most = min(len(self._prompts), llm.engine.config.max_running_requests)
        rows = []
        for batch in dict.fromkeys((1, most)):  # alone first: what is drafted from then on is often right
            for kind in self._params:
                if batch == 1 and is_reference:
                    continue
                before = _figures(llm)
                outputs = self._alone(llm, kind) if batch == 1 else self._together(llm, kind)
                row = Comparison(way, kind, batch)
                self._add(row, outputs)
                row.num_drafted, row.num_accepted = _since(llm, before)
                rows.append(row)
        llm.engine.scheduler.check_integrity()
        return rows

    def _add(self, row: Comparison, outputs: Sequence[RequestOutput]) -> None:
        for i, (output, reference) in enumerate(zip(outputs, self._wanted[row.kind], strict=True)):
            found, wanted = _logprobs(output.outputs[0]), _logprobs(reference.outputs[0])
            if len(found) != len(wanted):
                raise LosslessError(
                    f"{row.way}, {row.kind}, prompt {i}: got {len(found)} tokens, wanted {len(wanted)}, as asked for"
                )
            for position, (got, want) in enumerate(zip(found, wanted, strict=True)):
                if got.token_id != want.token_id:
                    margin = self._margin(row.kind, i, position, got.token_id)
                    is_tie = margin < self._tie_margin
                    row.differences.append(Difference(i, position, want.token_id, got.token_id, margin, is_tie))
                    break
                row.num_tokens += 1
                gap = abs(got.logprob - want.logprob)
                row.logprob_gap = max(row.logprob_gap, math.inf if math.isnan(gap) else gap)

    def _margin(self, kind: str, prompt: int, position: int, got: int) -> float:
        """Nats by which plain decoding preferred its token."""
        reference = self._wanted[kind][prompt]
        wanted = _logprobs(reference.outputs[0])[position]
        known = dict(wanted.top)
        if got not in known:
            return math.inf
        params = self._params[kind][prompt]
        before = reference.outputs[0].token_ids[:position]

        def score(token: int, logprob: float) -> float:
            count = before.count(token)
            return logprob - params.frequency_penalty * count - params.presence_penalty * (count > 0)

        margin = score(wanted.token_id, wanted.logprob) - score(got, known[got])
        if params.seed is not None:
            _, ints = sampling_row(params, params.seed, self._vocab)
            place = len(reference.prompt_token_ids) + position
            low, high, where = jnp.array([[ints[SEED_LOW]], [ints[SEED_HIGH]], [place]], jnp.int32)
            [noise] = gumbel_noise(low, high, where, self._vocab)
            margin += float(noise[wanted.token_id] - noise[got])
        return margin


def draw(llm: LLM, way: str, prompts: Sequence[Any], draws: Draws, seed: int) -> Distribution:
    """Draws tokens with many seeds and compares their distribution with the probabilities the model reports."""
    before = _figures(llm)
    found: list[TokenLogprob] = []
    number = 0
    while len(found) < draws.count:
        left = draws.count - len(found)
        for prompt in prompts:
            number += 1
            # Far from the seeds of other requests: output j of a request has a seed that follows from this one and j.
            params = SamplingParams(
                temperature=draws.temperature, top_k=draws.top_k, seed=seed + SEED_STRIDE * number,
                n=min(MAX_N, math.ceil(left / (len(prompts) * DRAW_TOKENS))), max_tokens=DRAW_TOKENS + 1,
                ignore_eos=True, logprobs=draws.top_k or MAX_LOGPROBS,
            )  # fmt: skip
            [output] = llm.generate([prompt], params)
            found += [token for one in output.outputs for token in _logprobs(one)[1:]]
    counts = count_ranks(found, draws.temperature, draws.top_k)
    drafted, accepted = _since(llm, before)
    tested = chi_square(counts.observed.tolist(), counts.expected.tolist())
    return Distribution(
        way, draws.temperature, draws.top_k, tested.observed, tested.expected, counts.num_impossible, drafted, accepted,
        tested.statistic, tested.degrees, tested.p_value,
    )  # fmt: skip


def _logprobs(output: CompletionOutput) -> list[TokenLogprob]:
    if output.error is not None:
        raise LosslessError(f"a request failed: {output.error}")
    assert output.logprobs is not None
    return output.logprobs


def _figures(llm: LLM) -> tuple[int, int] | None:
    speculation = llm.engine.scheduler.speculation
    return None if speculation is None else (speculation.figures.num_drafted, speculation.figures.num_accepted)


def _since(llm: LLM, before: tuple[int, int] | None) -> tuple[int | None, int | None]:
    after = _figures(llm)
    if before is None or after is None:
        return None, None
    return after[0] - before[0], after[1] - before[1]
