"""Host work a step on a null model: everything but the forward, detokenising included."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch

from paceline.bench.null_model import NullModel, byte_tokenizer
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.config import EngineOptions
from paceline.engine.build import engine_for
from paceline.request import SamplingParams

VOCABULARY = 256
GOAL_STEP_US = 200.0
GOAL_ROW_US = 8.0


def measure(rows: int, steps: int, temperature: float) -> float:
    """Median microseconds a steady decode step of `rows` requests takes."""
    engine = engine_for(
        NullModel(VOCABULARY, 4096), byte_tokenizer(),
        EngineOptions(max_num_seqs=rows, max_batch_tokens=4096, kv_blocks=rows * (steps // 16 + 8)),
        device=torch.device("cpu"))
    params = SamplingParams(max_tokens=steps + 64, temperature=temperature, seed=1, ignore_eos=True)
    for row in range(rows):
        engine.add([1 + row % 200, 2, 3, 4], params)
    for _ in range(8):
        engine.step()
    times = []
    gc.collect()
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def run(rows: tuple[int, ...] = (1, 8, 32, 64, 128), steps: int = 200) -> dict[str, Any]:
    found = []
    for temperature, name in ((0.0, "greedy"), (0.8, "sampled")):
        for count in rows:
            say(f"overhead: {name}, {count} rows")
            took = measure(count, steps, temperature)
            goal = GOAL_STEP_US + GOAL_ROW_US * count
            found.append(Row(f"{name}_{count}", "us/step", took, higher_is_better=False,
                             note=f"goal {goal:.0f} us ({GOAL_STEP_US:.0f} + {GOAL_ROW_US:.0f} a row)"))
    return document(found, steps=steps, vocabulary=VOCABULARY)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.overhead", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    json_argument(parser)
    arguments = parser.parse_args()
    emit(run(steps=arguments.steps), arguments.json)


if __name__ == "__main__":
    main()
