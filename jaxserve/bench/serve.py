"""``jaxserve bench serve``: a workload against any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxserve.bench.machine import machine
from jaxserve.bench.serve_client import ENDPOINTS, Target
from jaxserve.bench.serve_load import BenchError, Load, Measured, find_model, measure
from jaxserve.bench.serve_process import ServerUnderTest
from jaxserve.bench.serve_report import figures
from jaxserve.bench.serve_workload import Dataset, Tokens, make_prompts
from jaxserve.core.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """A whole serving bench.

    Attributes:
        base_url: where the server is, with or without ``/v1``.
        start: model of a server to start, instead of ``base_url``; ``server_flags`` go to it.
        model: name in the requests; by default the first that the server lists.
        tokenizer: model whose tokenizer measures prompts; by default that of ``start``.
        num_prompts, seed: which prompts; the seed also draws the pauses between them.
        extra: fields of every request body.
    """

    base_url: str = "http://127.0.0.1:8000"
    start: str | None = None
    server_flags: tuple[str, ...] = ()
    api_key: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    endpoint: str = "completions"
    dataset: Dataset = field(default_factory=Dataset)
    load: Load = field(default_factory=Load)
    num_prompts: int = 100
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    percentiles: tuple[float, ...] = (99.0,)

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ConfigError(f"--num-prompts must be at least 1, got {self.num_prompts}")
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"--endpoint {self.endpoint}: wanted {' or '.join(ENDPOINTS)}")
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {self.base_url}: wanted a URL like http://127.0.0.1:8000")
        if not all(0 < p < 100 for p in self.percentiles):
            raise ConfigError(f"--percentiles must be between 0 and 100, got {self.percentiles}")


def run(plan: Plan, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measures; starts and stops the server if the plan says so.

    Raises:
        BenchError: no server, a refusal, or not one request that succeeded.
        ConfigError: a dataset that cannot be used.
    """
    if plan.start is None:
        return _against(plan, plan.base_url, say)
    say(f"starting a server of {plan.start}")
    with ServerUnderTest(plan.start, plan.server_flags, say) as server:
        try:
            return _against(plan, server.url, say)
        except BenchError as error:
            if server.process.poll() is None:
                raise
            code = server.process.returncode
            raise BenchError(f"{error}; the server ended with code {code}: {server.last_words}") from None


def _against(plan: Plan, url: str, say: Callable[[str], None]) -> dict[str, Any]:
    url = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
    conditions = machine()
    tokens = Tokens(load_tokenizer(plan.tokenizer or plan.start))

    async def go() -> tuple[str, Measured]:
        name, context = await find_model(url, headers, plan.load, say)
        target = Target(url, plan.model or name, plan.endpoint, headers, plan.extra)
        dataset = dataclasses.replace(plan.dataset, context_length=context)
        prompts = make_prompts(dataset, plan.num_prompts, plan.seed, tokens, plan.endpoint == "chat")
        return target.model, await measure(target, prompts, plan.load, say)

    model, measured = asyncio.run(go())
    found = figures(measured, plan.percentiles)
    rate = plan.load.request_rate
    found["settings"] = {
        "base_url": url, "model": model, "endpoint": plan.endpoint, "dataset": plan.dataset.described,
        "lengths": "counted" if tokens.known else "estimated: no --tokenizer",
        "input_len": plan.dataset.input_len, "output_len": plan.dataset.output_len,
        "range_ratio": plan.dataset.range_ratio, "num_prompts": plan.num_prompts, "seed": plan.seed,
        "request_rate": "inf" if math.isinf(rate) else rate, "burstiness": plan.load.burstiness,
        "max_concurrency": plan.load.max_concurrency, "warmups": plan.load.warmups,
        "flush_cache": plan.load.flush_cache, "extra": plan.extra, "server_flags": list(plan.server_flags),
    }  # fmt: skip
    found["machine"] = conditions
    return found


def check(found: dict[str, Any]) -> None:
    """Raises BenchError if no request succeeded."""
    if found["completed"] == 0:
        kinds = "; ".join(f"{kind}: {found['error_examples'][kind]}" for kind in found["errors"])
        raise BenchError(f"none of {found['num_prompts']} requests succeeded: {kinds}")


def load_tokenizer(model: str | None) -> Any:
    """Of a checkpoint; None for None. Raises ModelLoadError."""
    if model is None:
        return None
    from jaxserve.models.loading.checkpoint import open_checkpoint
    from jaxserve.models.loading.default_model import default_model_path

    return open_checkpoint(default_model_path() if model == "default" else model).tokenizer
