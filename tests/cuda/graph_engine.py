"""Run as a program: an engine on the CPU whose fences are those of the CUDA twin, on the fake runtime, with the markers
for graphs. Prints its greedy tokens, which programs hold those markers, its fences, and more, as JSON.

    python graph_engine.py FOLDER xla-cmdbuf      the model is computed by XLA
    python graph_engine.py FOLDER cuda-graph      decode and verify steps are captured, and NGRAM drafts

XLA's CPU programs call the CUDA handlers, which enqueue on the fake compute stream. Dispatch is synchronous: when a
call returns its records are issued, and the fences count on that.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_build
import jax
import numpy as np
from fake_device import device_rows
from oracle import full_recompute_logits

from jaxserve.attention import registry
from jaxserve.barrier import channel, native, shared_rows
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.runner import captured_steps, graph_mode, model_runner
from jaxserve.testing import deviceless

HANDLERS = ("snapshot", "snapshot_graph", "record_end", "record_end_graph", "hold", "compute_stream", "captured_step")


def use_fake_cuda() -> tuple[object, ctypes.CDLL]:
    """Makes the twin on the fake runtime the extension of the CPU, in this process."""
    home = deviceless.cuda_data_dir()
    assert home is not None
    module, switches = fake_build.load(fake_build.build(home / "include"))
    capsules = {f"jaxserve_{name}": jax.ffi.pycapsule(getattr(switches, f"fake_{name}")) for name in HANDLERS}
    floats = set()  # addresses of buffers of float32

    def shared_buffer(rows, columns, is_float, name):
        made = module.SharedBuffer(rows, columns, is_float, name)
        if is_float:
            floats.add(made.address)
        return made

    names = {name: getattr(module, name) for name in dir(module) if not name.startswith("__")}
    names |= {"SharedBuffer": shared_buffer, "handlers": lambda: capsules}
    sys.modules["fake_cuda_as_cpu"] = SimpleNamespace(**names)  # type: ignore[assignment]
    native._MODULES["cpu"] = "fake_cuda_as_cpu"
    captured_steps.cublas_libraries = lambda: [module.__file__]
    for user in (channel, graph_mode, registry):
        user.ffi_platform = lambda platform: "CUDA"  # type: ignore[attr-defined]

    def in_place(buffer, copy):
        """The fake device's memory is the host's."""
        del copy
        found = device_rows(buffer)
        found = found.view(np.float32) if buffer.address in floats else found
        return real_from_dlpack(found, copy=False)

    real_from_dlpack = jax.dlpack.from_dlpack
    shared_rows.jax = SimpleNamespace(  # type: ignore[attr-defined]
        dlpack=SimpleNamespace(from_dlpack=in_place), device_put=jax.device_put, Array=jax.Array, jit=jax.jit
    )
    return module, switches


def main(folder: Path, graph_backend: str) -> None:
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    module, _ = use_fake_cuda()
    # Prompts too: handlers outside of graphs know their launch by the thread that dispatches, and on a CPU XLA calls
    # them from others.
    graph_mode.GraphMode.holds_markers = lambda self, mode: self.channel is not None  # type: ignore[method-assign]
    made = graph_mode.make_graph_mode

    def with_markers_for_graphs(config, platform, backend, channel, model):
        return dataclasses.replace(made(config, platform, backend, channel, model), channel=channel)

    model_runner.make_graph_mode = with_markers_for_graphs
    from jaxserve.bench.models import MODELS, TINY_QWEN3, write_model
    from jaxserve.bench.stepping import run_greedily
    from jaxserve.core.config import EngineConfig
    from jaxserve.engine.engine import Engine

    captures = graph_backend == "cuda-graph"
    settings: dict[str, Any] = {"attention_backend": "xla", "graph_snapshot": "inside"}
    if captures:
        settings = {"speculative_algorithm": "NGRAM", "speculative_adaptive": False}
    write_model(folder, (TINY_QWEN3 if captures else MODELS["tiny"]), 64)
    engine = Engine(
        EngineConfig(
            model=str(folder), load_format="dummy", dtype="bfloat16", num_pages=32, skip_warmup=True,
            max_running_requests=2, decode_batch_buckets=(2,), chunked_prefill_size=16, grammar_backend="none",
            compilation_cache_dir="", fence_timeout_s=5.0, graph_backend=graph_backend, **settings,
        )
    )  # fmt: skip
    prompts = np.random.default_rng(2).integers(0, 256, (2, 16)).tolist()
    run = run_greedily(engine, prompts, 24)
    steps = engine.parts.worker.step_runner.steps
    texts = {key.shape.mode.name: steps.get(key).as_text() for key in steps.keys()}  # noqa: SIM118
    inside = {mode: text.count('"jaxserve_snapshot_graph"') for mode, text in texts.items()}
    captured = engine.parts.worker.model_runner.captured
    before = None if captured is None else dataclasses.asdict(captured.counts())
    again = generate(engine, prompts, 24)  # NGRAM knows it by now
    after = None if captured is None else dataclasses.asdict(captured.counts())
    lost = [losses(engine.parts.model, prompts, tokens) for tokens in (run.tokens, again)]
    engine.close()
    found = {"tokens": run.tokens, "again": again, "inside": inside, "fences": run.fences, "losses": lost}
    print(json.dumps(found | {"captured": [before, after], "live": module.live_objects()}))


def generate(engine, prompts, max_tokens: int) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    tokens: dict[str, list[int]] = {f"again-{i}": [] for i in range(len(prompts))}
    for name, prompt in zip(tokens, prompts, strict=True):
        engine.add(Request(name, tuple(prompt), params))
    while engine.has_work:
        for delta in engine.step():
            assert not delta.error, delta.error
            tokens[delta.request_id] += delta.token_ids
    return list(tokens.values())


def losses(loaded, prompts, tokens) -> list[float]:
    """By how much each token's logit falls short of the best one's, as a share of the logits' spread; in float32, from
    all tokens before it."""
    wide = dataclasses.replace(loaded, leaves=[leaf.astype(np.float32) for leaf in loaded.leaves])
    found = []
    for prompt, output in zip(prompts, tokens, strict=True):
        logits = full_recompute_logits(wide, [*prompt, *output])[len(prompt) - 1 : -1, :256]
        chosen = logits[np.arange(len(output)), output]
        found += ((logits.max(-1) - chosen) / logits.std(-1)).tolist()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
