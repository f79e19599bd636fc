"""Smoke test of an installed package: its handlers register, a tiny model answers. Usage: smoke.py CHECKOUT"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(sys.argv[1]) / "tests"))

import jax
import tiny

import jaxserve
from jaxserve.barrier.native import native_module, runtime_ffi_minor

assert Path(jaxserve.__file__).parents[1] != Path(sys.argv[1]), f"{jaxserve.__file__} is the checkout, not the package"
twin = native_module("cpu")
print(f"jax {jax.__version__}, FFI minor built {twin.ffi_api_minor}, offered {runtime_ffi_minor()}")
print("handlers:", ", ".join(sorted(twin.handlers())))
with tempfile.TemporaryDirectory() as folder:
    model = tiny.write_tiny(Path(folder) / "tiny")
    with jaxserve.LLM(str(model), context_length=128, skip_warmup=True, compilation_cache_dir="") as llm:
        params = jaxserve.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        [output] = llm.generate([list(tiny.TINY_PROMPT)], params)
        print("tokens:", output.outputs[0].token_ids)
        print("fences:", dict(llm.engine.scheduler.barrier.counts))
        assert len(output.outputs[0].token_ids) == 8
