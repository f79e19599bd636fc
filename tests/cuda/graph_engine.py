"""Run as a program: an engine on the CPU whose fences are those of the CUDA twin, on the fake runtime, markers in the
graph. Prints its greedy tokens, which programs hold the graph variants of the markers, and its fences, as JSON.

XLA's CPU programs call the CUDA handlers, which enqueue on the fake compute stream. Dispatch is synchronous: when a
call returns its records are issued, and the fences count on that.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_build
import jax
import numpy as np
from fake_device import device_rows

from jaxserve.barrier import channel, native, shared_rows
from jaxserve.runner import graph_mode
from jaxserve.testing import deviceless

HANDLERS = ("snapshot", "snapshot_graph", "record_end", "record_end_graph", "hold", "compute_stream")


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
    for user in (channel, graph_mode):
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


def main(folder: Path) -> None:
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    module, _ = use_fake_cuda()
    # Prompts too: handlers outside of graphs know their launch by the thread that dispatches, and on a CPU XLA calls
    # them from others.
    graph_mode.GraphMode.holds_markers = lambda self, mode: self.channel is not None  # type: ignore[method-assign]
    from jaxserve.bench.models import MODELS, write_model
    from jaxserve.bench.stepping import run_greedily
    from jaxserve.core.config import EngineConfig
    from jaxserve.engine.engine import Engine

    write_model(folder, MODELS["tiny"], 64)
    engine = Engine(
        EngineConfig(
            model=str(folder), load_format="dummy", dtype="bfloat16", attention_backend="xla", num_pages=32,
            skip_warmup=True, max_running_requests=2, decode_batch_buckets=(2,), chunked_prefill_size=16,
            grammar_backend="none", compilation_cache_dir="", fence_timeout_s=5.0, graph_snapshot="inside",
        )
    )  # fmt: skip
    prompts = np.random.default_rng(2).integers(0, 256, (2, 16)).tolist()
    run = run_greedily(engine, prompts, 24)
    steps = engine.parts.worker.step_runner.steps
    texts = {key.shape.mode.name: steps.get(key).as_text() for key in steps.keys()}  # noqa: SIM118
    inside = {mode: text.count('"jaxserve_snapshot_graph"') for mode, text in texts.items()}
    engine.close()
    print(json.dumps({"tokens": run.tokens, "inside": inside, "fences": run.fences, "live": module.live_objects()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
