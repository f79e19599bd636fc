"""Measures decode steps of a model in torch: captured into a CUDA graph and replayed; eager where there is no GPU."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from worker import answer


def open_model(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """A model with random weights in the sizes of ``settings["config"]``, as ``config.json``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"auto": torch.bfloat16 if device == "cuda" else torch.float32}.get(settings["dtype"])
    dtype = dtype or getattr(torch, settings["dtype"])
    length = settings["prompt_tokens"] + settings["max_tokens"] + 1
    values = {**settings["config"], "max_position_embeddings": length}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(settings["seed"])
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    opened = {
        "torch": torch.__version__, "transformers": transformers.__version__, "device": device,
        "mode": "CUDA graph" if device == "cuda" else "eager", "dtype": str(dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation, "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip

    @torch.inference_mode()
    def reply(prompts: list[list[int]], rounds: int) -> dict[str, Any]:
        """All prompts decode together, greedily; of one length, so that no padding slows them down.

        Returns:
            ``step_ms``: between the tokens of one step and the next, all rounds; ``replay_ms``: per round, a step when
            the host fetches no token in between; ``capture_s``; ``graph_mib``; ``tokens_hash``; ``distinct_tokens``.
        """
        decode = _Decode(model, prompts, length, device)
        begin = time.perf_counter()
        before = torch.cuda.memory_reserved() if device == "cuda" else 0
        decode.capture()
        captured = time.perf_counter() - begin
        grown = (torch.cuda.memory_reserved() - before) / 2**20 if device == "cuda" else None
        steps: list[float] = []
        replays: list[float] = []
        outputs = []
        for _ in range(rounds):
            tokens = [decode.start()]
            earlier = time.perf_counter()
            for _ in range(settings["max_tokens"] - 1):
                decode.step()
                tokens.append(decode.fetched())
                now = time.perf_counter()
                steps.append(now - earlier)
                earlier = now
            outputs.append(tokens)
            decode.start()
            earlier = time.perf_counter()
            for _ in range(settings["max_tokens"] - 1):
                decode.step()
            decode.fetched()
            replays.append((time.perf_counter() - earlier) / (settings["max_tokens"] - 1))
        if any(tokens != outputs[0] for tokens in outputs):
            raise RuntimeError("greedy tokens differ between rounds")
        return {
            "step_ms": [1e3 * seconds for seconds in steps], "replay_ms": [1e3 * seconds for seconds in replays],
            "capture_s": captured, "graph_mib": grown,
            "tokens_hash": hashlib.sha256(repr(outputs[0]).encode()).hexdigest()[:16],
            "distinct_tokens": len({token for tokens in outputs[0] for token in tokens}),
        }  # fmt: skip

    return opened, reply


class _Decode:
    """Greedy decoding of one batch with a static cache; every buffer keeps its address, as a graph demands."""

    def __init__(self, model: Any, prompts: list[list[int]], length: int, device: str):
        self._model, self._device = model, device
        self._prompts = torch.tensor(prompts, device=device)
        self._cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        self._tokens = torch.zeros((len(prompts), 1), dtype=torch.long, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._graph: Any = None

    def start(self) -> list[int]:
        """Prefills; returns the first token of each prompt."""
        self._cache.reset()
        num = self._prompts.shape[1]
        positions = torch.arange(num, device=self._device)
        self._run(self._prompts, positions)
        self._position.fill_(num)
        return self.fetched()

    def capture(self) -> None:
        """Warms up, and captures a step where there is a GPU."""
        self.start()
        if self._device == "cpu":
            self.step()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._decode()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode()
        self._graph = graph

    def step(self) -> None:
        """One token for every sequence; does not wait for it."""
        if self._graph is None:
            self._decode()
        else:
            self._graph.replay()

    def fetched(self) -> list[int]:
        """The newest tokens, once they are there."""
        return self._tokens[:, 0].tolist()

    def _decode(self) -> None:
        self._run(self._tokens, self._position)
        self._position += 1

    def _run(self, tokens: Any, positions: Any) -> None:
        out = self._model(
            tokens, past_key_values=self._cache, cache_position=positions, position_ids=positions[None], use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        self._tokens.copy_(out.logits[:, -1:].argmax(-1))


if __name__ == "__main__":
    answer(open_model)
