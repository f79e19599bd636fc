"""Measures transformers on the CPU: a bare greedy loop with its cache, which is faster than ``generate()``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from worker import answer


def open_model(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32).eval()
    opened = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }

    @torch.inference_mode()
    def reply(prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """All prompts have one length, so that no padding slows them down."""
        steps = []
        start = time.perf_counter()
        out = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        chosen = out.logits[:, -1:].argmax(-1)
        tokens = [chosen.tolist()]
        first = before = time.perf_counter()
        for _ in range(max_tokens - 1):
            out = model(chosen, past_key_values=out.past_key_values, use_cache=True)
            chosen = out.logits[:, -1:].argmax(-1)
            tokens.append(chosen.tolist())
            now = time.perf_counter()
            steps.append(now - before)
            before = now
        by_prompt = [[step[row][0] for step in tokens] for row in range(len(prompts))]
        return {"steps": steps, "first_tokens": [first - start] * len(prompts), "tokens": by_prompt}

    return opened, reply


if __name__ == "__main__":
    answer(open_model)
