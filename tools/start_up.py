"""Start-up on a card: weights, cache and every captured step, until the first tokens; with Triton's cache empty (cold)
and filled (warm). Random weights made on the card, so no disk counts. Each run is a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from paceline.bench.gpu_shapes import SHAPES
from paceline.bench.report import Row, document, emit, json_argument, say


def start(shape: str, deterministic: bool) -> dict[str, float]:
    """Seconds since this process began to run Python code, by what was reached."""
    begun = time.perf_counter()
    import torch

    from paceline.bench.gpu import engine, prompts_of, seconds

    found = {"imports": time.perf_counter() - begun}
    llm = engine(shape, torch.bfloat16, deterministic)
    torch.cuda.synchronize()
    found["weights and cache"] = time.perf_counter() - begun
    reserved = torch.cuda.memory_reserved()
    found["steps"] = float(llm.engine.capture())
    torch.cuda.synchronize()
    found["captured"] = time.perf_counter() - begun
    seconds(llm, prompts_of([64], 1000, 0), [4])
    found["first tokens"] = time.perf_counter() - begun
    found["GiB for steps"] = (torch.cuda.memory_reserved() - reserved) / 2**30
    return found


def run(shape: str, deterministic: bool) -> dict[str, Any]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            command = [sys.executable, __file__, "--shape", shape, "--once"]
            done = subprocess.run(command + ["--deterministic"] * deterministic, stdout=subprocess.PIPE, text=True,
                                  check=True, env=os.environ | {"TRITON_CACHE_DIR": cache})
            found = json.loads(done.stdout.splitlines()[-1])
            say(f"start_up {shape}, {name}: {found}")
            rows += [Row(f"{name}: {what}", "s" if what not in ("steps", "GiB for steps") else "", value,
                         higher_is_better=False) for what, value in found.items()]
    return document(rows, shape=shape, deterministic=deterministic)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/start_up.py", description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--once", action="store_true", help="this process, with Triton's cache as it is; JSON")
    json_argument(parser)
    given = parser.parse_args()
    if given.once:
        print(json.dumps(start(given.shape, given.deterministic)))
        return
    emit(run(given.shape, given.deterministic), given.json)


if __name__ == "__main__":
    main()
