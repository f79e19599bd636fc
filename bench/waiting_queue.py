"""What a long queue costs the steps: the same decode steps with and without waiting requests, in turns, in one engine.

python bench/waiting_queue.py --waiting 10000 --json queue.json

There are two reasons to wait. *slots*: all are taken. *pages*: a slot is free, but the first in line finds too few
pages, and is tried anew at every step. CPU time is the step thread's: on a busy machine it says
more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxserve.bench.machine import machine
from jaxserve.bench.models import MODELS, NUM_WORDS, write_model
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.shapes import ceil_div
from jaxserve.engine.engine import Engine

PAGE_SIZE = 16
RUNNING_LEN = 64  # of the prompts that decode
WARM_STEPS = 5


class Rig:
    """An engine in which ``batch`` sequences decode for ``steps`` steps while nobody else can be admitted."""

    def __init__(self, folder: Path, why: str, batch: int, steps: int, waiting: int, waiting_len: int):
        self.batch, self.steps, self.waiting_len = batch, steps, waiting_len
        self._num_added = 0
        self._output_len = steps + WARM_STEPS + 3 * batch  # the first ones decode while the others are prefilled
        num_pages = batch * ceil_div(RUNNING_LEN + self._output_len, PAGE_SIZE)
        if num_pages - batch * RUNNING_LEN // PAGE_SIZE >= ceil_div(waiting_len, PAGE_SIZE):
            raise SystemExit("a waiting prompt would find pages; raise --waiting-len, or lower --steps or --batch")
        slots = batch if why == "slots" else batch + 1
        self.engine = Engine(EngineConfig(
            model=str(folder), load_format="dummy", page_size=PAGE_SIZE, num_pages=num_pages,
            max_running_requests=slots, max_queued_requests=waiting + batch, decode_batch_buckets=(slots,),
            prefill_token_buckets=(RUNNING_LEN,), chunked_prefill_size=RUNNING_LEN, skip_warmup=True,
        ))  # fmt: skip

    def _add(self, count: int, length: int, max_tokens: int) -> list[str]:
        """Queues prompts that begin like no other."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        ids = []
        for number in range(self._num_added, self._num_added + count):
            own = tuple(number // 100**place % 100 for place in range(4))
            request = Request(f"bench-{number}", own + tuple(i % NUM_WORDS for i in range(length - 4)), params)
            self.engine.add(request)
            ids.append(request.request_id)
        self._num_added += count
        return ids

    def block(self, waiting: int) -> list[tuple[float, float]]:
        """(seconds, seconds of CPU) of decode steps while so many wait."""
        engine, scheduler = self.engine, self.engine.scheduler
        ids = self._add(self.batch, RUNNING_LEN, self._output_len)
        while len(scheduler.running) < self.batch or any(s.prefilling for s in scheduler.running):
            engine.step()
        ids += self._add(waiting, self.waiting_len, 1)
        for _ in range(WARM_STEPS):
            engine.step()
        found = []
        for _ in range(self.steps):
            start, cpu = time.perf_counter(), time.thread_time()
            engine.step()
            found.append((time.perf_counter() - start, time.thread_time() - cpu))
            if len(scheduler.running) != self.batch or len(scheduler.waiting) != waiting:
                raise SystemExit(f"{len(scheduler.running)} run and {len(scheduler.waiting)} wait; nothing is known")
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
        return found


def compare(rig: Rig, waiting: int, rounds: int) -> dict[str, Any]:
    """Medians of both ways, and the median over rounds of what one takes of the other."""
    rig.block(waiting)  # compiles
    steps: dict[int, list[list[tuple[float, float]]]] = {0: [], waiting: []}
    for number in range(rounds):
        for count in (0, waiting) if number % 2 else (waiting, 0):  # neither always goes first
            steps[count].append(rig.block(count))
    found: dict[str, Any] = {}
    for place, name in enumerate(("step", "cpu")):
        medians = {n: [statistics.median(s[place] for s in block) for block in blocks] for n, blocks in steps.items()}
        ratios = sorted(long / none for long, none in zip(medians[waiting], medians[0], strict=True))
        found[f"{name}_ms"] = {str(n): round(statistics.median(each) * 1e3, 4) for n, each in medians.items()}
        found[f"{name}_ratio"] = {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny", help="sizes; smaller ones show more")
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--waiting-len", type=int, default=1024, help="tokens of each waiting prompt")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"bench": "waiting queue", "machine": machine()}
    result |= {name: value for name, value in vars(arguments).items() if name != "json"}
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), MODELS[arguments.model], 2 * arguments.waiting_len)
        for why in ("slots", "pages"):
            rig = Rig(folder, why, arguments.batch, arguments.steps, arguments.waiting, arguments.waiting_len)
            result[why] = compare(rig, arguments.waiting, arguments.rounds)
            rig.engine.close()
    text = json.dumps(result, indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
